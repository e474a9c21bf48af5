"""Rows of a dataset: a prompt each, and other columns for the rewards."""

import copy
import csv
import glob
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import TaskError
from ..functions import failed, json_object, named_function
from ..images import PART_TYPES, PLACE, Images, take_images

# By a file's ending, its format as `datasets` calls it. A .gz may follow.
FORMATS = {".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv", ".json": "json", ".parquet": "parquet"}
SEPARATORS = {".csv": ",", ".tsv": "\t"}
AS_TEXT = FORMATS.keys() - {".parquet"}  # `datasets` would turn "2026-01-31" into a time, and "007" into a number


@dataclass
class Row:
    """A row: its prompt, text or chat messages, and its other columns. Errors name its `origin`."""

    prompt: str | list[dict]
    columns: dict
    origin: str
    prompt_ids: list[int] = field(default_factory=list)  # what the engine gets, with one token for each image
    images: Images | None = None  # of the prompt, which has a place for each

    @property
    def text(self) -> str:
        """The prompt as it is shown on the screen: the text, or the last message's."""
        return self.prompt if isinstance(self.prompt, str) else content_text(self.prompt[-1].get("content"))


def content_text(content: str | list[dict] | None) -> str:
    """The text of a message's content, which may be in parts, as {"type": "text", "text": "..."}. None is no text."""
    return "".join(part.get("text", "") for part in content) if isinstance(content, list) else content or ""


def without_parts(prompt: str | list[dict]) -> str | list[dict]:
    """This prompt or completion, with the content of each message without images as one text: templates may print
    parts as Python does, or leave them out."""
    if isinstance(prompt, str):
        return prompt
    in_text = [isinstance(m.get("content"), list) and PLACE not in m["content"] for m in prompt]
    return [m | {"content": content_text(m["content"])} if flat else m for m, flat in zip(prompt, in_text, strict=True)]


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
        mapped = record
        if function:
            try:
                mapped = function(copy.deepcopy(record))  # a dataset's function may return its rows again
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


def file_ending(name: str) -> str | None:
    """The ending, one of FORMATS, by which this file is read; None if it has none of them."""
    ending = Path(name.lower().removesuffix(".gz")).suffix
    return ending if ending in FORMATS else None


def _row(record: dict, origin: str, reserved: Iterable[str], default_prompt: list[dict] | None) -> Row:
    record = dict(record) if isinstance(record, dict) else {}
    forms = {"prompt": _are_messages, "tools": _are_objects}
    given = {name: record[name] for name in forms if record.get(name) is not None}
    record |= {name: _without_nones(_from_json(value, forms[name])) for name, value in given.items()}
    prompt = default_prompt if record.get("prompt") is None else record["prompt"]
    is_chat = _are_messages(prompt)
    if not (is_chat or isinstance(prompt, str)) or not prompt:
        raise TaskError(
            f'{origin}: no usable "prompt" (a text, or a list of chat messages with "role" and "content") among'
            f" {', '.join(sorted(map(str, record))) or 'no columns'}: --map can make one"
        )
    images, columns = None, {name: value for name, value in record.items() if name != "prompt"}
    if is_chat:
        for message in prompt:
            if not _is_content(content := message.get("content", "")):
                raise TaskError(
                    f"{origin}: the content {content!r} of a message is neither a text nor a list of"
                    ' {"type": "text", "text": "..."} and {"type": "image"}'
                )
        prompt, images = take_images(record | {"prompt": prompt}, origin)
    elif record.get("images") or record.get("image"):
        raise TaskError(f"{origin}: a prompt with images is chat messages, and not a text: --map can make them")
    if images:
        columns = {name: value for name, value in columns.items() if name != "image"} | {"images": images}
    try:
        json.dumps(prompt, ensure_ascii=False).encode()
    except (UnicodeEncodeError, TypeError) as error:
        raise TaskError(f"{origin}: the prompt is not Unicode text, or not JSON ({error})") from error
    if taken := record.keys() & set(reserved):
        raise TaskError(f"{origin}: a reward gets {' and '.join(sorted(taken))} from the run itself")
    return Row(prompt, columns, origin, images=images)


def _from_json(value, has_form: Callable[[object], bool]):
    """The value of this form that a text is in JSON, since a CSV can hold no other; any other value as it is."""
    with suppress(ValueError, RecursionError):
        if isinstance(value, str) and has_form(parsed := json.loads(value)):
            return parsed
    return value


def _are_objects(value) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _are_messages(value) -> bool:
    """Whether these are chat messages, at least one."""
    has_more = {"content", "tool_calls"}.intersection
    return _are_objects(value) and bool(value) and all("role" in item and has_more(item) for item in value)


def _is_content(content) -> bool:
    """Whether this content of a message is a text, or parts that are texts and images."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
    return all(
        kind in PART_TYPES or (kind == "text" and isinstance(part.get("text"), str))
        for kind, part in zip(kinds, parts, strict=True)
    )


def _without_nones(value):
    """The value without the Nones in its objects. `datasets` gives all objects of a column the same keys, with None
    where a key was missing; chat templates and schemas of tools would take None for a value."""
    if isinstance(value, dict):
        return {key: _without_nones(part) for key, part in value.items() if part is not None}
    return [_without_nones(part) for part in value] if isinstance(value, list) else value


def _records(name: str, config: str | None, split: str) -> list[dict]:
    """The rows of a function, of files, or of what else `datasets.load_dataset` takes.

    `datasets` finds the files of each split. CSV and JSON are read here, since it guesses the types of texts.
    """
    if re.fullmatch(r"[\w.]+:\w+", name):
        try:
            return list(named_function("--dataset", name)(split, **json.loads(json_object(config or "{}"))))
        except TaskError:
            raise
        except Exception as error:
            raise failed(f"--dataset {name}", error) from error
    ending = file_ending(name)
    import datasets  # only where it is needed: importing it takes a second
    from datasets.features.features import Image, _visit

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs is in the error that it raises, too
    pattern = glob.escape(name) if os.path.isfile(name) else name  # which may be a pattern itself, or an address
    source = {"path": FORMATS[ending], "data_files": pattern} if ending else {"path": name, "name": config}
    with tempfile.TemporaryDirectory() as cache:  # local files need none
        local = {"cache_dir": cache} if os.path.exists(name) else {}
        try:
            files = datasets.load_dataset_builder(**source, **local).config.data_files if ending or local else {}
            if files and all(file_ending(file) in AS_TEXT for of_split in files.values() for file in of_split):
                return _read_split(files, split)
            rows = datasets.load_dataset(**source, split=split, **local)
            # Images as files have them: decoded, they are ten times as large.
            as_in_files = _visit(rows.features, lambda own: Image(decode=False) if isinstance(own, Image) else own)
            return list(rows.cast(as_in_files))
        except Exception as error:  # which errors `datasets` and its hub client raise depends on their versions
            cause = str(error.__cause__ or error).strip().partition("\n")[0]
            raise TaskError(f"cannot load the dataset {name}: {type(error).__name__}: {cause}") from error


def _read_split(files: dict[str, list[str]], split: str) -> list[dict]:
    """The rows of `split`, which may consist of slices ("train[:9]+test"). `files` has the files of each split."""
    from datasets import ReadInstruction

    rows = {str(own): [row for file in of_split for row in _read(file)] for own, of_split in files.items()}
    slices = ReadInstruction.from_spec("+".join(rows) if split == "all" else split)
    slices = slices.to_absolute({own: len(rows[own]) for own in rows})
    return [row for part in slices for row in rows[part.splitname][part.from_ : part.to]]


def _read(file: str) -> Iterator[dict]:
    """The rows of a JSON file, an array or lines, or of a CSV file, whose fields are texts, or None if empty."""
    import fsspec  # as `datasets` opens files: a .gz and addresses as well

    with fsspec.open(file, "rt", encoding="utf-8-sig", newline="", compression="infer") as lines:  # -sig: with its BOM
        if separator := SEPARATORS.get(file_ending(file)):
            csv.field_size_limit(sys.maxsize)  # by default, a field has at most 131,072 characters
            reader = csv.DictReader(lines, delimiter=separator, strict=True)
            columns = reader.fieldnames or []
            if len(set(columns)) < len(columns):
                raise ValueError(f"{file} has two columns of the same name")
            for row in reader:
                if None in row:
                    raise ValueError(f"line {reader.line_num} of {file} has more fields than its header")
                yield {column: text or None for column, text in row.items()}
            return
        text = lines.read()
        if file_ending(file) == ".json" and text.lstrip().startswith("["):
            yield from json.loads(text)
            return
        for number, line in enumerate(text.split("\n"), 1):
            try:
                yield from [json.loads(line)] if line.strip() else []
            except ValueError as error:
                raise ValueError(f"line {number} of {file} is not JSON ({error})") from None  # this is shown
