"""What can be wrong with a run before it begins; the message says what to change."""

from __future__ import annotations


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
