"""What pydantic found wrong with the settings, said as: place, key, value, what was expected, what may be meant."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from jurybox.server.settings_sources import Key, did_you_mean, shown

_LONGEST_VALUE = 80

_WORDS = {
    "Input should be a valid dictionary or instance of ModelSettings": "expected a table",
    "Input should be a valid dictionary or instance of ServerSettings": "expected a table",
    "Input should be a valid dictionary or instance of TensorSettings": "expected a table",
    "Input should be a valid dictionary": "expected a table",
    "Input should be a valid boolean": "expected true or false",
    "Input should be a valid integer": "expected an integer",
    "Input should be a valid ": "expected a ",
    "Input should be ": "expected ",
    "input was not a valid JSON value": "expected a string, number, boolean, list or table",
}


def problems(error: ValidationError, model: type[BaseModel], place: Callable[[Key], str]) -> list[str]:
    """One line for every wrong setting.

    Args:
        model: what was validated.
        place: gives where a key was given.
    """
    return [
        _line(tuple(map(str, detail["loc"])), detail["type"], detail["msg"], detail["input"], model, place)
        for detail in error.errors(include_url=False)
    ]


def _line(key: Key, kind: str, message: str, value: object, model: type[BaseModel], place: Callable[[Key], str]) -> str:
    if key[-1:] == ("[key]",):
        key = key[:-1]
        return f"{place(key)}: {shown(key)}: {_expected(message)}"
    at = f"{place(key)}: {shown(key)}"
    if kind == "extra_forbidden":
        *table, name = key
        known = _fields_at(model, table)
        elsewhere = [other for other in _tables(model) if name in _fields_at(model, other)]
        where = f"; it is a setting of [{shown((*elsewhere[0],))}]" if elsewhere else did_you_mean(name, known)
        return f"{at}: no such setting{where}"
    if kind == "missing":
        return f"{at}: is missing"
    if isinstance(value, dict):  # of a whole table: its rule says which values came
        return f"{at}: {_expected(message)}"
    if key == ("server", "token"):
        return f"{at}: expected text"  # and not a word about what came: it may be a secret all the same
    given = repr(value)
    given = given if len(given) <= _LONGEST_VALUE else f"{given[:_LONGEST_VALUE]}..."
    hint = ""
    if kind == "literal_error" and isinstance(value, str):
        choices = message.replace(" or ", ", ").removeprefix("Input should be ").split(", ")
        near = difflib.get_close_matches(value.lower(), [choice.strip("'") for choice in choices], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{at} = {given}: {_expected(message)}{hint}"


def _expected(message: str) -> str:
    """pydantic's message in our words."""
    message = message.removeprefix("Value error, ")
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    return message


def _fields_at(model: type[BaseModel], table: Sequence[str]) -> list[str]:
    """The settings of the table at that key; none where there is no such table."""
    found: type[BaseModel] = model
    parts = list(table)
    while parts:
        field = found.model_fields.get(parts.pop(0))
        inner = _settings_in(field.annotation) if field else None
        if inner is None:
            return []
        found = inner
        if inner is not field.annotation:  # type: ignore[union-attr]
            parts[:1] = []  # tables by name: the next part is any name
    return list(found.model_fields)


def _tables(model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        yield (name,) if _settings_in(field.annotation) is field.annotation else (name, "NAME")


def _settings_in(annotation: Any) -> type[BaseModel] | None:
    """The settings class X inside X, X | None, or dict[str, X]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := _settings_in(part))), None)
