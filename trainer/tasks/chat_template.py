"""A model's chat template: the tokens of a prompt, and the tokens that more messages add to a conversation."""

import copy
import json
import re
from contextlib import suppress

from ..errors import TaskError
from .dataset import content_text, without_parts

# To render answers, a placeholder turn stands for what the policy has sampled. The first one that fits is taken:
# Qwen3's template leaves a turn as it was only if it has reasoning, DeepSeek-V3's takes a call's arguments as text.
THOUGHT = "thought_0"
PLACEHOLDERS = ({"arguments": {}}, {"arguments": {}, "reasoning_content": THOUGHT}, {"arguments": "{}"})
MARK = re.compile("\ue000(\\d+)\ue001")  # in Unicode's private use area: stands for a special token in a tool's text


class ChatTemplate:
    """The chat template of this tokenizer, with the template's own `options` (chat_template_kwargs)."""

    def __init__(self, tokenizer, options: dict):
        self.tokenizer, self.options = tokenizer, options
        self.for_tools = False  # until `check_tools` has found that it is made for them
        self.complete: set[str] = set()  # messages with words of ours, as JSON, that it renders completely
        self.special = sorted((t.content for t in tokenizer.added_tokens_decoder.values() if t.special), reverse=True)
        self.special_text = re.compile("|".join(map(re.escape, self.special)) or r"(?!)")

    def prompt_ids(
        self, messages: list[dict], tools: list[dict] | None, origin: str, of_agent: bool = False
    ) -> list[int]:
        """The tokens of chat messages. After them, a completion begins or, if the last message is the assistant's, goes
        on with it. `tools` are the schemas that the template describes to the model. Raises TaskError if the template
        refuses the messages, or leaves out some. Those of an agent's request may be left out, and are never gone on
        with."""
        if not self.tokenizer.chat_template:
            model = self.tokenizer.name_or_path
            raise TaskError(f"{origin}: the prompt is chat messages, and {model} has no chat template")
        goes_on = messages[-1]["role"] == "assistant" and not of_agent
        options = {"tools": tools or None, "add_generation_prompt": not goes_on, "continue_final_message": goes_on}
        for copied in (_with_objects, list):  # DeepSeek-V3's template takes a call's arguments as text
            try:
                own = copied(messages)
                text = self._render(own, **options)
                left_out = not of_agent and self._left_out(own, **options)
                break
            except Exception as error:  # templates raise what they like
                problem = f"{type(error).__name__}: {error}"
        else:
            raise TaskError(f"{origin}: the chat template raised {problem}")
        if left_out:
            raise TaskError(f"{origin}: the chat template leaves out {left_out}")
        return self.tokenizer.encode(text, add_special_tokens=False)  # the template has written them

    def answer_ids(self, answers: list[dict], end: int | None, thought: bool = False) -> list[int]:
        """The tokens that follow a turn of the policy, whose last token is `end`, or None if it was cut off: those of
        tools' answers or other messages, and of the next turn's beginning.

        Special tokens in the answers' text and names are text. Raises TaskError if the template cannot add answers
        without changing the turns before; with `thought`, these have reasoning.
        """
        marked = ("name", "content")
        answers = [own | {key: self._marked(own[key]) for key in marked if key in own} for own in answers]
        problem, of_tools = "it changes the turns before", answers[0]["role"] == "tool"
        for placeholder in () if of_tools and end is None else PLACEHOLDERS:  # a call that was cut off is none
            turn = {"role": "assistant", "content": "" if of_tools else "?"} | placeholder
            function = {"name": answers[0].get("name", ""), "arguments": turn.pop("arguments")}
            if of_tools:
                turn["tool_calls"] = [{"type": "function", "function": function}]
            before = [{"role": "user", "content": "?"}, turn]
            try:
                begin = len(self._encode(self._render(before[:1])))  # of the turn
                prefix = self._encode(self._render(before, continue_final_message=end is None))
                text = self._render([*before, *answers], add_generation_prompt=True)
                whole = self._encode(text)
            except Exception as error:  # templates raise what they like
                problem = f"{type(error).__name__}: {error}"
                continue
            if thought and THOUGHT not in text:
                continue
            # What the template writes after a turn's end, such as a line break, was not sampled.
            ends = (self.tokenizer.eos_token_id, end)  # the last `end` counts or, without one, the last EOS
            lengths = [i + 1 for last in ends for i in range(begin, len(prefix)) if prefix[i] == last]
            prefix = prefix[: lengths[-1]] if lengths else prefix
            if whole[: len(prefix)] == prefix:
                ids = whole[len(prefix) :]
                return ids[1:] if ids[:1] == [end] else ids  # GLM ends a turn by the token that answers begin with
        raise TaskError(
            f"the chat template cannot add a tool's answer to a conversation ({problem}): chat_template_kwargs of a"
            ' task\'s DEFAULTS takes another one, as {"chat_template": "..."}'
        )

    def check_tools(self) -> None:
        """Raise TaskError if the template leaves out tools' calls or answers, or cannot add answers to a turn."""
        if self.for_tools:
            return
        arguments = {"key_1": "value_2"}
        answer = {"role": "tool", "name": "look_3", "content": "found_4"}
        self.answer_ids([answer], self.tokenizer.eos_token_id)
        for value in (arguments, json.dumps(arguments)):  # DeepSeek-V3's takes text
            call = {"type": "function", "function": {"name": "look_3", "arguments": value}}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            with suppress(Exception):  # templates raise what they like
                text = self._render([{"role": "user", "content": "?"}, turn, answer])
                if all(word in text for word in ("key_1", "value_2", "look_3", "found_4")):
                    self.for_tools = True
                    return
        raise TaskError("the chat template leaves out tools' calls or their answers: it is not made for tools")

    def _render(self, messages: list[dict], **options) -> str:
        return self.tokenizer.apply_chat_template(without_parts(messages), tokenize=False, **options, **self.options)

    def _left_out(self, messages: list[dict], **options) -> str:
        """What the template leaves out of such messages, as words of ours in place of their texts and of their calls'
        names show; "" if nothing. A text may change on its way: Llama 3.1's template trims it, and Qwen3's drops the
        reasoning of earlier answers."""
        messages, words = json.loads(json.dumps(messages)), {}  # copies: no object is there twice
        for i, message in enumerate(messages):
            if content_text(message.get("content")).strip():
                message["content"] = f"content_{i}_"
                words[message["content"]] = f"the content of a message of the role {message['role']!r}"
            for j, call in enumerate(message.get("tool_calls", ())):
                function = call.get("function", call)
                function["name"] = f"call_{i}_{j}_"
                words[function["name"]] = "a tool's call"
        if (shape := json.dumps([messages, bool(options["tools"])])) not in self.complete:
            text = self._render(messages, **options)
            for word, what in words.items():
                if word not in text:
                    return what
            self.complete.add(shape)
        return ""

    def _marked(self, text: str) -> str:
        """A tool's content or name, with marks in place of special tokens."""
        text = re.sub("[\ue000\ue001]", "", text)  # or it could have marks of its own
        return self.special_text.sub(lambda match: f"\ue000{self.special.index(match[0])}\ue001", text)

    def _encode(self, text: str) -> list[int]:
        ids = []
        for i, part in enumerate(MARK.split(text)):  # even parts are text, odd ones numbers of special tokens
            is_special = bool(i % 2)
            part_text = self.special[int(part)] if is_special else part
            ids += self.tokenizer.encode(part_text, add_special_tokens=False, split_special_tokens=is_special)
        return ids


def _with_objects(messages: list[dict]) -> list[dict]:
    """Copies of the messages, in which the arguments of calls are objects, where OpenAI's format has JSON text."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            with suppress(KeyError, TypeError, ValueError):  # there are none, or no JSON text
                arguments = json.loads(function["arguments"] or "{}")
                function["arguments"] = arguments if isinstance(arguments, dict) else function["arguments"]
    return messages
