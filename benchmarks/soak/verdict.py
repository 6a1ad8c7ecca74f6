"""What the samples of a soak say: of every quantity how it went, and whether it grew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.soak.sampling import MIB, Sample, SharedSample
from benchmarks.soak.trend import Trend, trend

_SETTLING = 1 / 6  # of the time: caches fill, allocators reach their size
_FEWEST = 8  # points

# What a rise must exceed, beside the noise: memory in MiB, the others in pieces.
_FLOORS: dict[str, tuple[Callable[[Sample], float], float]] = {
    "memory of its own, MiB": (lambda sample: sample.anonymous / MIB, 2.0),
    "proportional memory, MiB": (lambda sample: sample.pss / MIB, 4.0),
    "descriptors": (lambda sample: sample.descriptors, 1.0),
    "threads": (lambda sample: sample.threads, 1.0),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity of one process (or of shared memory, or of a client's answers).

    Attributes:
        counts: whether its growth is the server's fault: latency follows whatever else the machine does.
    """

    of: str
    quantity: str
    trend: Trend
    counts: bool = True

    @property
    def verdict(self) -> str:
        return "GROWS" if self.trend.grows else "no growth"


def judge(
    samples: Sequence[Sample], shared: Sequence[SharedSample], windows: dict[str, list[dict[str, Any]]]
) -> list[Row]:
    """The trends, but for the settling time; of a process that was replaced, those of its longest life."""
    begin = max(item.seconds for item in shared) * _SETTLING
    rows = []
    for role in dict.fromkeys(sample.role for sample in samples):
        life = _longest_life([sample for sample in samples if sample.role == role and sample.seconds >= begin])
        for quantity, (value, floor) in _FLOORS.items():
            rows += _row(role, quantity, [(sample.seconds, value(sample)) for sample in life], floor)
    settled = [item for item in shared if item.seconds >= begin]
    rows += _row("shared memory", "segments and pipes", [(item.seconds, item.segments) for item in settled], 0.5)
    rows += _row("shared memory", "MiB", [(item.seconds, item.bytes / MIB) for item in settled], 1.0)
    for role, lines in windows.items():
        for quantity in ("p50_ms", "p99_ms"):
            points = [
                (line["seconds"], line[quantity]) for line in lines if line["answered"] and line["seconds"] >= begin
            ]
            typical = sorted(value for _, value in points)[len(points) // 2] if points else 0.0
            rows += _row(f"answers: {role}", quantity.replace("_ms", ", ms"), points, typical / 5, counts=False)
    return rows


def _row(
    of: str, quantity: str, points: Iterable[tuple[float, float]], floor: float, *, counts: bool = True
) -> list[Row]:
    points = list(points)
    if len(points) < _FEWEST:
        return []
    seconds, values = zip(*points, strict=True)
    return [Row(of, quantity, trend(seconds, values, floor), counts)]


def _longest_life(samples: Sequence[Sample]) -> list[Sample]:
    lives: dict[int, list[Sample]] = {}
    for sample in samples:
        lives.setdefault(sample.pid, []).append(sample)
    return max(lives.values(), key=len, default=[])
