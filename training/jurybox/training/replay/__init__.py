"""Replay: a shared-memory ring of transitions between actors and learners."""

from jurybox.training.replay.batch import Batch
from jurybox.training.replay.options import Damaged, Episodes, Field, NotEnoughRows, RateLimiter, Windows
from jurybox.training.replay.part import Counters
from jurybox.training.replay.replay import Replay
from jurybox.training.replay.writers import Reservation, Streams

__all__ = [
    "Batch",
    "Counters",
    "Damaged",
    "Episodes",
    "Field",
    "NotEnoughRows",
    "RateLimiter",
    "Replay",
    "Reservation",
    "Streams",
    "Windows",
]
