"""The settings of a training as they are shown and given: flags of its command, and rows of the page of settings.

A settings class is the one definition: names, types and defaults are its fields', meanings their descriptions or the
"Attributes:" of its docstring.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import tomllib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from jurybox.training.runtime.settings import SB3, Settings

_KINDS = {bool: "true|false", int: "integer", float: "number", str: "text", Path: "path", dict: "table", tuple: "list"}
_SAME_IN_SB3 = {
    "seed", "device", "learning_rate", "gamma", "batch_size", "buffer_size", "learning_starts", "gradient_steps",
    "train_freq", "tau", "n_steps", "n_epochs", "gae_lambda", "clip_range", "ent_coef", "vf_coef", "max_grad_norm",
    "normalize_advantage", "target_kl", "target_update_interval", "exploration_fraction", "exploration_initial_eps",
    "exploration_final_eps", "policy_delay", "action_noise", "target_policy_noise", "target_noise_clip",
    "target_entropy", "log_std_init",
}  # fmt: skip
_ATTRIBUTE = re.compile(r"(\w+(?:, \w+)*): (.*)")


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a training.

    Attributes:
        name: its name; of a part's, "part.NAME".
        kind: the type, for people: "integer", "number", "text", "a|b", "list", "table", "true|false".
        default: the default as TOML, or "none".
        meaning: one sentence or two.
        theirs: what Stable-Baselines3 calls it; empty: it has none.
        literal: whether a value is text that is not parsed as TOML.
    """

    name: str
    kind: str
    default: str
    meaning: str
    theirs: str = ""
    literal: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def value_of(self, text: str) -> Any:
        """Return the value of a flag's text: as TOML, a list also as 64,64 or 64; other text as it is."""
        if self.literal:
            return text
        for form in (text, f"[{text}]") if self.kind == "list" else (text,):
            try:
                found = tomllib.loads(f"value = {form}")["value"]
            except tomllib.TOMLDecodeError:
                continue
            if self.kind != "list" or isinstance(found, list):
                return found
        return text


def settings_of(settings: type[Settings], values: Mapping[str, Any] | None = None) -> list[Setting]:
    """Return all settings of a training, in the order of the class; those of a part follow one another.

    Args:
        values: values of settings by which variants are chosen, such as the algorithm; the others are those of all.
    """
    theirs = {ours: name for name, ours in SB3.items()} | {name: name for name in _SAME_IN_SB3}
    variants = settings.variants(values or {})
    of_all = settings.model_fields
    found: dict[str, dict[str, Setting]] = {}  # by name and variant
    for variant, of_class in variants.items():
        for one in _walked(of_class, "", None):
            found.setdefault(one.name, {})[variant] = dataclasses.replace(one, theirs=theirs.get(one.name, ""))
    rows = [
        next(iter(each.values())) if name.partition(".")[0] in of_all or len(variants) == 1 else _together(each)
        for name, each in found.items()
    ]
    return sorted(rows, key=lambda one: one.name.partition(".")[0] not in of_all)  # sorting keeps the order


def _together(variants: Mapping[str, Setting]) -> Setting:
    """Return the setting of that name in several variants: what differs, with the names of the variants."""
    first = next(iter(variants.values()))

    def told(part: str, always: bool, between: str) -> str:
        said: dict[str, list[str]] = {}
        for variant, one in variants.items():
            said.setdefault(getattr(one, part), []).append(variant)
        if len(said) == 1 and not always:
            return str(getattr(first, part))
        return between.join(f"{text.removesuffix('.')} ({' '.join(names)})" for text, names in said.items())

    meaning = told("meaning", False, ". ")
    return dataclasses.replace(
        first,
        kind="|".join(dict.fromkeys(kind for one in variants.values() for kind in one.kind.split("|"))),
        default=told("default", True, ", "),
        meaning=meaning if meaning.endswith(".") else f"{meaning}.",
        literal=all(one.literal for one in variants.values()),
    )


def _walked(of: Any, prefix: str, values: Any) -> Iterator[Setting]:
    """Yield the settings of a class; `values` is the object with a part's defaults, if it is not the class's own."""
    told = _attributes(of)
    hints = get_type_hints(of)
    for name, of_class, description in _fields(of):
        default = of_class if values is None else getattr(values, name)
        if isinstance(default, BaseModel) or (dataclasses.is_dataclass(default) and not isinstance(default, type)):
            yield from _walked(type(default), f"{prefix}{name}.", default)
            continue
        shown, literal = _kind_of(hints[name])
        meaning = (description or told.get(name, "")).replace("``", "`")  # docstrings quote code as reST does
        yield Setting(prefix + name, shown, _as_toml(default), meaning, literal=literal)


def _fields(of: Any) -> Iterator[tuple[str, Any, str]]:
    if issubclass(of, BaseModel):
        for name, field in of.model_fields.items():
            default = field.get_default(call_default_factory=True)
            yield name, None if default is PydanticUndefined else default, field.description or ""
        return
    for each in dataclasses.fields(of):
        made = each.default_factory() if each.default_factory is not dataclasses.MISSING else each.default
        yield each.name, None if made is dataclasses.MISSING else made, ""


def _kind_of(hint: Any) -> tuple[str, bool]:
    """Return the type for people, and whether its values are always text."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [_kind_of(one) for one in inner if one is not type(None)]
        return "|".join(dict.fromkeys(kind for kind, _ in kinds)), all(literal for _, literal in kinds)
    if origin is Literal:
        return "|".join(map(str, inner)), all(isinstance(one, str) for one in inner)
    if origin is not None and hasattr(hint, "__metadata__"):  # Annotated
        return _kind_of(inner[0])
    plain = origin or hint
    return _KINDS.get(plain, getattr(plain, "__name__", str(plain))), plain in (str, Path)


def _as_toml(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_as_toml, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_as_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, float) and not isinstance(value, bool):
        return f"{value:g}"
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


def _attributes(of: Any) -> dict[str, str]:
    """Return what the "Attributes:" of a class's docstring say, by name."""
    # Python 3.13 strips the indentation from docstrings; without it they are the same in each version.
    _, found, text = inspect.cleandoc(of.__doc__ or "").partition("Attributes:\n")
    told: dict[str, str] = {}
    names: list[str] = []
    for line in text.splitlines() if found else ():
        stripped = line.strip()
        deeper = len(line) - len(line.lstrip()) > len("    ")
        if (match := _ATTRIBUTE.fullmatch(stripped)) and not deeper:
            names = match[1].split(", ")
            told |= dict.fromkeys(names, match[2])
        elif stripped and deeper:
            told |= {name: f"{told[name]} {stripped}" for name in names}
        elif stripped:
            break
    return {name: f"{meaning[0].upper()}{meaning[1:]}" for name, meaning in told.items()}
