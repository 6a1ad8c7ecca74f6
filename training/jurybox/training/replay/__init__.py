"""Replay: transitions in shared memory, at the memory's speed, between many actors and learners."""

from jurybox.training.replay.batch import Batch
from jurybox.training.replay.counters import Counters
from jurybox.training.replay.errors import Damaged, NotEnoughRows
from jurybox.training.replay.field import Field
from jurybox.training.replay.options import Episodes, RateLimiter, Windows
from jurybox.training.replay.replay import Replay
from jurybox.training.replay.reservation import Reservation
from jurybox.training.replay.stream import Streams

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
