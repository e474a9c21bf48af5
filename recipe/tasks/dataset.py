"""Rows of a dataset: a prompt each, and other columns for the rewards."""

import json
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import TaskError
from ..functions import failed, named_function

FORMATS = {".jsonl": "text", ".json": "json", ".parquet": "parquet", ".csv": "csv"}  # as `datasets` calls them


@dataclass
class Row:
    """A row: its prompt, text or chat messages, and its other columns. Errors name its `origin`."""

    prompt: str | list[dict]
    columns: dict
    origin: str
    prompt_ids: list[int] = field(default_factory=list)  # what the engine gets, and the trainer learns on

    @property
    def text(self) -> str:
        """The prompt as it is shown on the screen: the text, or the last message's."""
        return self.prompt if isinstance(self.prompt, str) else content_text(self.prompt[-1].get("content"))


def content_text(content: str | list[dict] | None) -> str:
    """The text of a message's content, which may be in parts, as {"type": "text", "text": "..."}. None is no text."""
    return "".join(part.get("text", "") for part in content) if isinstance(content, list) else content or ""


def load_rows(
    name: str,
    config: str | None,
    split: str,
    mapping: str | None,
    reserved: Iterable[str],
    default_prompt: list[dict] | None = None,
) -> list[Row]:
    """The rows of one split of a dataset, mapped by the function `mapping` ("module:function"), if there is one.

    Columns that some rows lack are None there, as TRL's rewards expect. A row that the function maps to None is left
    out. A row without a prompt gets the `default_prompt`. Raises TaskError, which names the row, if its prompt is
    neither text nor messages, or if a column has a `reserved` name.
    """
    function, rows = named_function("--map", mapping) if mapping else None, []
    for number, record in enumerate(_records(name, config, split)):
        origin = f"{name}, row {number} of {split}"
        if name.endswith(".jsonl") and not record.strip():
            continue
        mapped = _parsed(record, origin) if name.endswith(".jsonl") else record
        if function:
            try:
                mapped = function(mapped)
            except Exception as error:
                raise failed(f"{origin}: --map {mapping}", error) from error
            if mapped is None:
                continue
        rows.append(_row(mapped, origin, reserved, default_prompt))
    if not rows:
        raise TaskError(f"{name} has no prompts")
    columns = dict.fromkeys(column for row in rows for column in row.columns)  # in the order of appearance
    for row in rows:
        row.columns = {column: row.columns.get(column) for column in columns}
    return rows


def _parsed(line: str, origin: str):
    """The value of a line of JSON. `datasets` would turn a text such as "2026-01-31" into a time."""
    try:
        return json.loads(line)
    except ValueError as error:
        raise TaskError(f"{origin}: not JSON ({error})") from error


def _row(record: dict, origin: str, reserved: Iterable[str], default_prompt: list[dict] | None) -> Row:
    record = dict(record) if isinstance(record, dict) else {}
    record |= {name: _without_nones(record[name]) for name in ("prompt", "tools") if record.get(name) is not None}
    prompt = default_prompt if record.get("prompt") is None else record["prompt"]
    is_chat = isinstance(prompt, list) and all(map(_is_message, prompt))
    if not (is_chat or isinstance(prompt, str)) or not prompt:
        raise TaskError(
            f'{origin}: no usable "prompt" (a text, or a list of chat messages with "role" and "content") among'
            f" {', '.join(sorted(map(str, record))) or 'no columns'}: --map can make one"
        )
    try:
        json.dumps(prompt, ensure_ascii=False).encode()
    except (UnicodeEncodeError, TypeError) as error:
        raise TaskError(f"{origin}: the prompt is not Unicode text, or not JSON ({error})") from error
    if taken := record.keys() & set(reserved):
        raise TaskError(f"{origin}: a reward gets {' and '.join(sorted(taken))} from the run itself")
    return Row(prompt, {name: value for name, value in record.items() if name != "prompt"}, origin)


def _is_message(message) -> bool:
    """Whether this is a chat message. If its content is in parts, they are objects, and the "text" of one is a text."""
    if not (isinstance(message, dict) and "role" in message and message.keys() & {"content", "tool_calls"}):
        return False
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return all(isinstance(part, dict) and isinstance(part.get("text", ""), str) for part in parts)


def _without_nones(value):
    """The value without the Nones in its objects. `datasets` gives all objects of a column the same keys, with None
    where a key was missing; chat templates and schemas of tools would take None for a value."""
    if isinstance(value, dict):
        return {key: _without_nones(part) for key, part in value.items() if part is not None}
    return [_without_nones(part) for part in value] if isinstance(value, list) else value


def _records(name: str, config: str | None, split: str) -> list[dict | str]:
    """The rows of a function, of a local file (of .jsonl: its lines), or of what else `datasets.load_dataset` takes."""
    if re.fullmatch(r"[\w.]+:\w+", name):
        try:
            return list(named_function("--dataset", name)(split))
        except TaskError:
            raise
        except Exception as error:
            raise failed(f"--dataset {name}", error) from error
    if os.path.isfile(name) and not os.path.getsize(name):
        return []  # for which `datasets` has another error in each format
    import datasets  # only where it is needed: importing it takes a second

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs is in the error that it raises, too
    file_format = FORMATS.get(Path(name).suffix)
    source = {"path": file_format, "data_files": name} if file_format else {"path": name, "name": config}
    source |= {"encoding": "utf-8-sig"} if file_format == "text" else {}  # with or without a byte-order mark
    with tempfile.TemporaryDirectory() as cache:  # local files need none
        local = {"cache_dir": cache} if os.path.exists(name) else {}
        try:
            rows = datasets.load_dataset(**source, split=split, **local)
            return list(rows["text"] if file_format == "text" else rows)
        except Exception as error:  # which errors `datasets` and its hub client raise depends on their versions
            cause = str(error.__cause__ or error).strip().partition("\n")[0]
            raise TaskError(f"cannot load the dataset {name}: {type(error).__name__}: {cause}") from error
