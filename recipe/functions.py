"""Functions, modules and JSON objects that a flag names, and the errors that a user's functions raise."""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable

from .errors import TaskError


def named_function(flag: str, name: str) -> Callable:
    """The function, or callable object, called `module:function`. Modules are also searched in the working folder."""
    value = named_value(flag, name)
    if not callable(value):
        raise TaskError("{} {}: {} has no function {}".format(flag, name, *name.split(":", 1)))
    return value


def named_value(flag: str, name: str):
    """What is called `module:name`; None if the module has no such name."""
    module, _, own = name.partition(":")
    if not module or not own:
        raise TaskError(f"{flag} {name}: not of the form module:function")
    return getattr(import_module(f"{flag} {name}", module), own, None)


def import_module(what: str, module: str):
    """A module, also from the working folder. Raises TaskError: importing runs the user's code."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise TaskError(f"{what} cannot be imported: {type(error).__name__}: {error}") from error


def failed(what: str, error: Exception) -> TaskError:
    """The error to raise for what a user's function has raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = f"{os.path.basename(frame.filename)}, line {frame.lineno}"
    return TaskError(f"{what} raised {type(error).__name__}: {error} ({line})")


def json_object(text: str) -> str:
    """`text`, if it is a JSON object; a ValueError if not."""
    if not isinstance(json.loads(text), dict):
        raise ValueError("a JSON object is wanted")
    return text
