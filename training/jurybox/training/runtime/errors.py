"""What can be wrong with a run before it begins; the message says what to change."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class RunError(ValueError):
    """The run cannot be as it was asked for."""


class PlanError(RunError):
    """The plan contradicts itself, or names something that is not there."""


class NothingToResume(RunError):
    """There is no checkpoint, or it is of another run."""


class NotRunning(RunError):
    """No run is going on in that folder."""


class ConfigError(RunError):
    """Settings that don't go together, or a file that cannot be read; the message says which."""


def refuse_unused(given: Collection[str], unused: Mapping[str, str]) -> None:
    """Make sure that nobody has set what has no effect: he would take the result for that of his setting.

    Args:
        given: names of the settings that were set; those left at their defaults are no matter.
        unused: by name, why a setting has no effect beside the others.

    Raises:
        ConfigError: something is in both.
    """
    if idle := sorted(set(given) & unused.keys()):
        told = "; ".join(f"{name} is set and would have no effect: {unused[name]}" for name in idle)
        raise ConfigError(f"{told}. Leave it out, or change what it goes with")
