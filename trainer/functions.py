"""Functions, modules and JSON objects that a flag names, and the errors that a user's functions raise."""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable

from .errors import TaskError


def named_function(flag: str, name: str) -> Callable:
    """The function, or other callable, that `module:function` names. Raises TaskError if there is none."""
    value = named_value(flag, name)
    if not callable(value):
        module, _, function = name.partition(":")
        file = getattr(sys.modules[module], "__file__", None)  # a package's, perhaps, instead of the working folder's
        raise TaskError(f"{flag} {name}: {module} has no function {function} ({file})")
    return value


def named_value(flag: str, name: str):
    """What `module:name` names; None if the module has no such name. Raises TaskError if there is no such module."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise TaskError(f"{flag} {name}: not of the form module:function")
    return getattr(import_module(f"{flag} {name}", module), attribute, None)


def import_module(what: str, module: str):
    """Import a module, also from the working folder. Raises TaskError for whatever the module's own code raises."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: nothing in it may take the place of a package that others import
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise TaskError(f"{what} cannot be imported: {type(error).__name__}: {error}") from error


def failed(what: str, error: Exception) -> TaskError:
    """The TaskError for an error that a user's function has raised. Says in which line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = f"{os.path.basename(frame.filename)}, line {frame.lineno}"
    text = " ".join(str(error).split())  # in one line, as errors are shown
    return TaskError(f"{what} raised {type(error).__name__}: {text} ({line})")


def json_object(text: str) -> str:
    """Returns `text` if it is a JSON object, and raises ValueError if not."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"a JSON object is wanted ({error})") from error
    if not isinstance(value, dict):
        raise ValueError("a JSON object is wanted")
    return text
