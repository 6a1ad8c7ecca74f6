"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class End(Enum):
    """Why a run is over."""

    STEPS = "all steps of the budget are made"
    SECONDS = "the time is up"
    TARGET = "the target is reached"
    SIGNAL = "it was told to stop"
    FAILED = "a role failed too often"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        end: why it is over; `text` says more where there is more to say.
        env_steps, learner_steps, epochs, episodes: of all roles together, earlier parts of a resumed run counted in.
        seconds: of wall time, likewise.
        return_mean, return_std: over the last 100 episodes; None when none has ended.
        restarts: of all roles together.
        forced_syncs: looks for newer weights that max_lag brought about.
        busy: by role, the part of its running time in which it did not wait, 0 to 1.
        evaluation: the newest one's numbers, as eval_<name>.
        serial: whether it ended, or was run from the start, in one process.
    """

    end: End
    text: str
    env_steps: int
    learner_steps: int
    epochs: int
    episodes: int
    seconds: float
    return_mean: float | None
    return_std: float | None
    restarts: int
    forced_syncs: int
    busy: dict[str, float]
    evaluation: dict[str, float]
    serial: bool
