"""Flags that are fields of dataclasses. A script's `Arguments` has a field for each dataclass whose flags it takes.

Some of these fields are settings: only the DEFAULTS of a task change them.
"""

import dataclasses
import inspect
from dataclasses import dataclass
from functools import partial


@dataclass
class Flag:
    """What the command line and --help need of a flag or a setting."""

    type: object
    default: object
    help: str
    alias: str
    title: str  # of its section in --help
    is_setting: bool


def arg(default, help: str, alias: str = "", is_setting: bool = False):
    """A field that is a flag; its type gives the bounds. A `default` that is a function makes the value."""
    value = {"default_factory" if callable(default) else "default": default}
    return dataclasses.field(**value, metadata={"help": help, "alias": alias, "is_setting": is_setting})


def setting(default, help: str):
    """As `arg`, for a field that is no flag."""
    return arg(default, help, is_setting=True)


def section(cls: type, **own):
    """A field of a script's `Arguments` for the flags of this dataclass. `own` are defaults that only this script has,
    or `arg`s where the help differs as well."""
    fields = {name: value for name, value in own.items() if isinstance(value, dataclasses.Field)}
    own |= {name: value.default for name, value in fields.items()}
    own_help = {name: value.metadata["help"] for name, value in fields.items()}
    return dataclasses.field(default_factory=partial(cls, **own), metadata=own_help)


def flags_in(cls: type) -> dict[str, Flag]:
    """The flags and settings of a script's `Arguments`, by name."""
    defaults, flags = cls(), {}
    sections = [field for field in dataclasses.fields(cls) if dataclasses.is_dataclass(field.type)]
    parts = [(getattr(defaults, field.name), field.metadata) for field in sections]
    for part, own_help in [*parts, (defaults, {})]:
        for field in dataclasses.fields(part):
            if "help" in field.metadata:
                bases = reversed(type(part).__mro__)
                declaring = next(base for base in bases if field.name in inspect.get_annotations(base))
                title = declaring.__doc__.splitlines()[0].rstrip(".")
                help_text = own_help.get(field.name, field.metadata["help"])
                default = getattr(part, field.name)
                alias, is_setting = field.metadata["alias"], field.metadata["is_setting"]
                flags[field.name] = Flag(field.type, default, help_text, alias, title, is_setting)
    return flags


def flat(args) -> dict:
    """The values of these arguments by the names of their flags, and other fields."""
    values = {}
    for name, value in vars(args).items():
        values |= flat(value) if dataclasses.is_dataclass(value) else {name: value}
    return values


def with_values(args, values: dict):
    """A copy of these arguments with those of these values that they have a field for, in whatever section."""
    changes = {}
    for name, value in vars(args).items():
        if dataclasses.is_dataclass(value):
            changes[name] = with_values(value, values)
        elif name in values:
            changes[name] = values[name]
    return dataclasses.replace(args, **changes)
