"""A model's chat template: the tokens of a prompt, and those that tools' answers add to a conversation."""

import json
import re
from contextlib import suppress

from ..errors import TaskError

# The turn that stands for what the policy has sampled, where answers are rendered. The first one that fits is taken:
# Qwen3's template keeps a turn as it was only with its reasoning, DeepSeek-V3's takes a call's arguments as text.
PLACEHOLDERS = ({"arguments": {}}, {"arguments": {}, "reasoning_content": "so"}, {"arguments": "{}"})
MARK = re.compile("\ue000(\\d+)\ue001")  # of Unicode's private use: stands for a special token in a tool's text


class ChatTemplate:
    """The chat template of this tokenizer, with `options` of its own."""

    def __init__(self, tokenizer, options: dict):
        self.tokenizer, self.options = tokenizer, options
        self.special = sorted((t.content for t in tokenizer.added_tokens_decoder.values() if t.special), reverse=True)
        self.special_text = re.compile("|".join(map(re.escape, self.special)) or r"(?!)")

    def prompt_ids(self, messages: list[dict], tools: list[dict] | None, origin: str) -> list[int]:
        """The tokens of chat messages, up to where the answer begins, or where it goes on if the last one is the
        assistant's. `tools` are the schemas that the template is to describe."""
        goes_on = messages[-1]["role"] == "assistant"
        options = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
        try:
            text = self._render(messages, tools=tools or None, **options)
        except Exception as error:  # templates raise what they like
            raise TaskError(f"{origin}: the chat template raised {type(error).__name__}: {error}") from error
        return self.tokenizer.encode(text, add_special_tokens=False)  # the template has written them

    def answer_ids(self, answers: list[dict], end: int) -> list[int]:
        """The tokens that follow a turn of the policy, which ended with the token `end`: tools' answers, which are
        messages, and the beginning of the next turn.

        Special tokens in the answers' text are text. Raises TaskError if the template cannot add answers to a
        conversation and leave what was there before as it was.
        """
        answers = [answer | {"content": self._marked(answer["content"])} for answer in answers]
        problem = "it changes the turns before"
        for placeholder in PLACEHOLDERS:
            others = {"role": "assistant", "content": ""} | placeholder
            function = {"name": answers[0]["name"], "arguments": others.pop("arguments")}
            before = [
                {"role": "user", "content": "?"},
                others | {"tool_calls": [{"type": "function", "function": function}]},
            ]
            try:
                prefix = self._encode(self._render(before))
                whole = self._encode(self._render([*before, *answers], add_generation_prompt=True))
            except Exception as error:  # templates raise what they like
                problem = f"{type(error).__name__}: {error}"
                continue
            # What the template writes behind the end of a turn, such as a line break, was not sampled.
            ends = [
                i + 1 for token in (self.tokenizer.eos_token_id, end) for i, own in enumerate(prefix) if own == token
            ]
            prefix = prefix[: ends[-1]] if ends else prefix
            if whole[: len(prefix)] == prefix:
                return whole[len(prefix) :]
        raise TaskError(
            f"the chat template cannot add a tool's answer to a conversation ({problem}): --chat-template-kwargs takes"
            ' another one, as {"chat_template": "..."}'
        )

    def check_tools(self) -> None:
        """Raise TaskError if the template does not write calls of tools and what they answer, or not behind a turn."""
        arguments = {"key_1": "value_2"}
        answer = {"role": "tool", "name": "look_3", "content": "found_4"}
        self.answer_ids([answer], self.tokenizer.eos_token_id)
        for written in (arguments, json.dumps(arguments)):  # DeepSeek-V3's takes the second
            call = {"type": "function", "function": {"name": "look_3", "arguments": written}}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            with suppress(Exception):  # templates raise what they like
                text = self._render([{"role": "user", "content": "?"}, turn, answer])
                if all(word in text for word in ("key_1", "value_2", "look_3", "found_4")):
                    return
        raise TaskError("the chat template leaves out tools' calls or their answers: it is not made for tools")

    def _render(self, messages: list[dict], **options) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **options, **self.options)

    def _marked(self, content):
        """A tool's content, with marks in place of special tokens."""
        if isinstance(content, list):  # of parts, as {"type": "text", "text": "..."}
            return [part | {"text": self._marked(part["text"])} if "text" in part else part for part in content]
        return self.special_text.sub(lambda found: f"\ue000{self.special.index(found[0])}\ue001", content)

    def _encode(self, text: str) -> list[int]:
        ids = []
        for i, part in enumerate(MARK.split(text)):  # every second one is a special token's number
            own = self.special[int(part)] if i % 2 else part
            ids += self.tokenizer.encode(own, add_special_tokens=False, split_special_tokens=bool(i % 2))
        return ids
