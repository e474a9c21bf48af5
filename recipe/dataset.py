"""Rows of a dataset: a prompt each, and other columns for the rewards."""

import importlib
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .errors import TaskError

FORMATS = {".json": "json", ".parquet": "parquet", ".csv": "csv"}  # the names that `datasets` has for local files


@dataclass
class Row:
    """A prompt, text or chat messages, and its other columns. `place` says where it comes from, for errors."""

    prompt: str | list[dict]
    columns: dict
    place: str
    prompt_ids: list[int] = field(default_factory=list)  # what the engine gets, and the trainer learns on

    @property
    def text(self) -> str:
        """The prompt as it is shown: of messages the last one."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]


def named_function(flag: str, name: str) -> Callable:
    """The function, or callable object, called `module:function`. Modules are also searched in the working folder."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise TaskError(f"{flag} {name}: not of the form module:function")
    value = getattr(import_module(f"{flag} {name}", module), function, None)
    if not callable(value):
        raise TaskError(f"{flag} {name}: {module} has no function {function}")
    return value


def import_module(what: str, module: str):
    """A module, also from the working folder. Raises TaskError: importing runs the user's code."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise TaskError(f"{what} cannot be imported: {type(error).__name__}: {error}") from error


def failed(what: str, error: Exception) -> TaskError:
    """What to raise when a user's function has raised this."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(frame.filename)}, line {frame.lineno}"
    return TaskError(f"{what} raised {type(error).__name__}: {error} ({place})")


def load_rows(name: str, config: str | None, split: str, mapping: str | None, reserved: Iterable[str]) -> list[Row]:
    """The rows of one split of a dataset, mapped by the function `mapping` ("module:function"), if there is one.

    Columns that some rows lack are None there, as TRL's rewards expect. A row that the function maps to None is left
    out. Raises TaskError, which names the row, for a prompt that is none, or a column with a `reserved` name.
    """
    function, rows = named_function("--map", mapping) if mapping else None, []
    for place, record in _records(name, config, split):
        if function:
            try:
                record = function(record)  # noqa: PLW2901 - from here on the row is what it is mapped to
            except Exception as error:
                raise failed(f"{place}: --map {mapping}", error) from error
            if record is None:
                continue
        rows.append(_row(record, place, reserved))
    if not rows:
        raise TaskError(f"{name} has no prompts")
    columns = dict.fromkeys(column for row in rows for column in row.columns)  # in the order of appearance
    for row in rows:
        row.columns = {column: row.columns.get(column) for column in columns}
    return rows


def _row(record: dict, place: str, reserved: Iterable[str]) -> Row:
    prompt = record.get("prompt") if isinstance(record, dict) else None
    messages = isinstance(prompt, list) and all(isinstance(m, dict) and "role" in m and "content" in m for m in prompt)
    if not prompt or not (messages or isinstance(prompt, str)):
        raise TaskError(f'{place}: not an object with a "prompt" that is a text or a list of chat messages')
    try:
        json.dumps(prompt, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise TaskError(f"{place}: the prompt is not Unicode text ({error})") from error
    if taken := record.keys() & set(reserved):
        raise TaskError(f"{place}: a reward gets {' and '.join(sorted(taken))} from the run itself")
    return Row(prompt, {name: value for name, value in record.items() if name != "prompt"}, place)


def _records(name: str, config: str | None, split: str) -> Iterator[tuple[str, dict]]:
    """The places and contents of a dataset's rows."""
    if name.endswith(".jsonl"):
        return _json_lines(name)
    if re.fullmatch(r"[\w.]+:\w+", name):
        try:
            records = list(named_function("--dataset", name)(split))
        except TaskError:
            raise
        except Exception as error:
            raise failed(f"--dataset {name}", error) from error
    else:
        records = _load_dataset(name, config, split)
    return ((f"{name}, row {i} of {split}", record) for i, record in enumerate(records))


def _json_lines(path: str) -> Iterator[tuple[str, dict]]:
    try:
        with open(path, encoding="utf-8-sig") as file:  # with or without a byte-order mark
            lines = file.readlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield f"{path}, line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise TaskError(f"{path}, line {number}: not JSON ({error})") from error


def _load_dataset(name: str, config: str | None, split: str) -> list[dict]:
    """The rows of what `datasets.load_dataset` takes, or of a local file."""
    import datasets  # only where it is needed: importing it takes a second

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs is in the error that it raises, too
    file_format = FORMATS.get(Path(name).suffix)
    path = {"path": file_format, "data_files": name} if file_format else {"path": name, "name": config}
    with tempfile.TemporaryDirectory() as cache:  # local files need none
        local = {"cache_dir": cache} if os.path.exists(name) else {}
        try:
            return list(datasets.load_dataset(**path, split=split, **local))
        except Exception as error:  # `datasets` and its hub client raise different errors by version
            cause = str(error.__cause__ or error).strip().splitlines()[0]
            raise TaskError(f"cannot load the dataset {name}: {type(error).__name__}: {cause}") from error
