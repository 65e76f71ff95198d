"""One setting: its rule, and how a TOML value, an environment string or a keyword becomes its value."""

import difflib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NewType, get_origin

import attrs
import cattrs

from workspace.errors import ConfigError

Bytes = NewType("Bytes", int)

_POWERS = {"": 0, "b": 0} | {
    letter + suffix: power for power, letter in enumerate("kmgt", start=1) for suffix in ("", "b", "ib")
}
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}

_converter = cattrs.Converter()


def parse_bytes(value: object) -> int:
    """Bytes of ``4096``, ``"2 MiB"`` or ``"512K"``; every unit is a power of 1024."""
    if not isinstance(value, str):
        return _integer(value)
    match = re.fullmatch(r"(-?\d+)\s*([a-zA-Z]*)", value.strip())
    if match is None or match[2].lower() not in _POWERS:
        raise ValueError(value)
    return int(match[1]) * 1024 ** _POWERS[match[2].lower()]


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(value)
    return word in _TRUE


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(value)
    return int(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(value)
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value.strip()


def _path(value: object) -> Path:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise TypeError(value)
    return Path(value)


def _pairs(value: object) -> dict[str, str]:
    """A table, or the environment's ``draft=caching,indexer=event_fenced``."""
    if isinstance(value, str):
        value = dict(entry.split("=", 1) for entry in value.split(",") if entry.strip())
    if not isinstance(value, Mapping):
        raise TypeError(value)
    return {_text(key): _text(name) for key, name in value.items()}


def _choice(value: object, kind: Any) -> str:
    if value not in kind.__args__:
        raise ValueError(value)
    return str(value)


_PARSERS: dict[Any, Callable[[object], Any]] = {
    Bytes: parse_bytes,
    bool: _flag,
    int: _integer,
    float: _number,
    str: _text,
    Path: _path,
    dict[str, str]: _pairs,
}
_converter.register_structure_hook_func(_PARSERS.__contains__, lambda value, kind: _PARSERS[kind](value))
for _kind in (bool, int, float, str, Path):  # where a predicate does not replace the lenient hook of cattrs
    _converter.register_structure_hook(_kind, lambda value, kind: _PARSERS[kind](value))
_converter.register_structure_hook_func(lambda kind: get_origin(kind) is Literal, _choice)


def nearest(name: str, known: list[str]) -> str | None:
    """The known name most like `name`, or None when none is close."""
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    return close[0] if close else None


def structure(field: Any, value: object, source: str = "") -> Any:
    """The typed value of one setting.

    Parameters
    ----------
    field
        An attrs field made by `setting`.
    value
        As found in a TOML file, an environment variable, an option or a keyword argument.
    source
        Where it was found, for the error.

    Raises
    ------
    ConfigError
        Names the key, the value, the rule, the nearest allowed value and the remedy.
    """
    if isinstance(value, str) and value.strip().lower() == "none":
        value = None
    try:
        result = _converter.structure(value, field.type)
        if field.metadata["allows"](result):
            return result
    except (TypeError, ValueError, cattrs.BaseValidationError):
        pass  # whatever the parser objected to, the error below names the rule that was broken
    choices = [choice for choice in getattr(field.type, "__args__", ()) if isinstance(choice, str)]
    near, rule = nearest(str(value), choices), field.metadata["rule"]
    raise ConfigError(
        f"{field.name} = {value!r}{f' (from {source})' if source else ''} is not allowed: it must be {rule}",
        f"did you mean {near!r}?" if near else f"give {rule}, or remove the setting",
        key=field.name,
        value=value,
        rule=rule,
        near=near,
        source=source,
    )


def setting(default: Any, rule: str, about: str, allows: Callable[[Any], bool] = lambda value: True) -> Any:
    """An attrs field with a rule.

    Parameters
    ----------
    default
        Its default; a type is called for a fresh one.
    rule
        Completes "it must be ...".
    about
        What the setting does, with its unit; one line.
    allows
        Whether a value of the right type obeys the rule.
    """
    mutable = isinstance(default, type)
    return attrs.field(
        default=attrs.Factory(default) if mutable else default,
        hash=not mutable,
        converter=attrs.Converter(lambda value, field: structure(field, value), takes_field=True),
        metadata={"rule": rule, "about": about, "allows": allows},
    )


def at_least(least: float, optional: bool = False) -> Callable[[Any], bool]:
    """The rule that a number is `least` or more; `optional` allows None."""
    return lambda value: optional if value is None else value >= least
