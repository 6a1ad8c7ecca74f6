"""The members of a fleet: which runs there are, one for each seed and each variation of the settings."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jurybox.training.runtime.plan import ConfigError
from jurybox.training.runtime.settings import merged

_UNSAFE = re.compile(r"[^\w.,=+\[\]-]+")


@dataclass(frozen=True, slots=True, eq=False)
class FleetMember:
    """One run of a fleet.

    Attributes:
        variation: the settings that are its own, besides the seed, by name ("ppo.n_steps").
        name: its folder within the fleet's.
    """

    seed: int
    variation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> list[str]:
        """The parts of its variation, as "learning_rate=0.001"."""
        return [f"{name}={_shown(value)}" for name, value in self.variation.items()]

    @property
    def name(self) -> str:
        own = f"seed-{self.seed}"
        return f"{_UNSAFE.sub('-', ','.join(self.labels))}/{own}" if self.variation else own

    def applied(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings, as nested values, with those of this member."""
        found = dict(values)
        for name, value in (*self.variation.items(), ("seed", self.seed)):
            nested: Any = value
            for part in reversed(name.split(".")):
                nested = {part: nested}
            found = merged(found, nested)
        return found


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else str(value).replace(" ", "").replace("'", "")


def members_of(seeds: str | None, vary: Sequence[str], given: Mapping[str, Any], seed: int) -> list[FleetMember]:
    """Return the members: each variation with each seed. No seeds and no variation: none, it is a single run.

    Args:
        seeds: "0,1,2"; None: the one of the settings.
        vary: ``NAME=[VALUE, VALUE]`` strings, as TOML; every value of each goes with every value of the others.
        given: the settings on the command line, nested; those of a file are overridden.
        seed: that of the settings.

    Raises:
        ConfigError: one of them is of another form, twice there, or set in `given`, too.
    """
    if seeds is None and not vary:
        return []
    numbers = [seed] if seeds is None else _seeds_of(seeds, given)
    varied: dict[str, list[Any]] = {}
    for each in vary:
        name, found = _variation_of(each)
        if name in varied or _held(given, name):
            raise ConfigError(f"--vary {name}: it is set or varied in another place, too: give it in one of them")
        varied[name] = found
    chosen = [dict(zip(varied, each, strict=True)) for each in itertools.product(*varied.values())]
    members = [FleetMember(number, variation) for variation in chosen for number in numbers]
    if len({member.name for member in members}) < len(members):
        raise ConfigError(f"--vary: expected different values, whose folders have different names, got {varied}")
    return members


def _seeds_of(text: str, given: Mapping[str, Any]) -> list[int]:
    named = [number.strip() for number in text.split(",")]
    if not all(number.isdecimal() for number in named) or len({int(number) for number in named}) < len(named):
        raise ConfigError(f"--seeds {text!r}: expected different whole numbers with commas between them, 0,1,2")
    if "seed" in given:
        raise ConfigError("--seed and --seeds together: give the seeds in one of the two")
    return [int(number) for number in named]


def _variation_of(text: str) -> tuple[str, list[Any]]:
    name, equals, listed = (part.strip() for part in text.partition("="))
    try:
        found = tomllib.loads(f"value = {listed}")["value"] if equals else None
    except tomllib.TOMLDecodeError:
        found = None
    if not re.fullmatch(r"\w+(\.\w+)*", name) or not isinstance(found, list) or len(found) < 2:
        raise ConfigError(
            f"--vary {text!r}: expected a setting and two or more values, learning_rate=[0.001, 0.0003], or "
            '\'algorithm=["ppo", "dqn"]\''
        )
    if name == "seed":
        raise ConfigError("--vary seed: several seeds are --seeds 0,1,2")
    return name, found


def _held(values: Any, name: str) -> bool:
    for part in name.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True
