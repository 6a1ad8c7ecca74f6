"""What the commands that carry out a plan have in common: their options, and how they end."""

from __future__ import annotations

import signal
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from jurybox.training.interrupts import Signals
from jurybox.training.runtime.plan import ConfigError, End, Outcome


class RunFailed(RuntimeError):
    """The run could not go on; the message is its reason."""


def changes_of(changes: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of ``NAME=VALUE`` strings, then of options that were given (not None).

    Raises:
        ConfigError: a string is of another form.
    """
    changed: dict[str, Any] = {}
    for change in changes:
        try:
            changed = merged(changed, tomllib.loads(change))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"--set {change!r}: expected NAME=VALUE with a value as in TOML ({error})") from error
    return {**changed, **{name: value for name, value in given.items() if value is not None}}


def merged(said: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Both, tables within them joined too: ``learner.actor_rate = 0.001`` changes that one alone."""
    found = dict(said)
    for name, value in changes.items():
        before = found.get(name)
        found[name] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return found


def conclude(outcome: Outcome, signals: Signals) -> None:
    """Raise what a command ends with when its run did not come to an end of its own.

    Raises:
        RunFailed: a role failed for good.
        KeyboardInterrupt: it was told to stop, and has, in order.
    """
    if outcome.end is End.SIGNAL:
        signal.raise_signal(signals.first)  # to whoever handled signals before the run
    if outcome.end is End.FAILED:
        raise RunFailed(outcome.text)
