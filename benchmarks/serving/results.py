"""What a run found, as it is written to JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Window:
    """One measurement. CPU is in microseconds a request, over all processes of the side."""

    requests_per_s: float
    rows_per_s: float
    p50_us: float
    p99_us: float
    p999_us: float
    server_cpu_us: float
    client_cpu_us: float
    others_cores: float
    loudest: str
    least_of_a_client: int
    most_of_a_client: int

    @property
    def cpu_us(self) -> float:
        return self.server_cpu_us + self.client_cpu_us


@dataclass
class Point:
    """All windows of a contender with so many clients in a case.

    Attributes:
        windows: those kept, one a round.
        disturbed: how many of them are only the quietest of several, all too noisy.
        thrown: windows thrown away because something else was running.
        unique_mib: memory of a client that no other process shares.
        server_mib, clients_mib: of the server's processes and of all clients', pages that several share counted
            once; in crossover.py alone.
    """

    case: str
    contender: str
    clients: int
    windows: list[Window] = field(default_factory=list)
    disturbed: int = 0
    thrown: int = 0
    unique_mib: float = 0.0
    server_mib: float = 0.0
    clients_mib: float = 0.0

    def median(self, figure: str) -> float:
        """Of a figure of Window."""
        return float(median(getattr(window, figure) for window in self.windows))


@dataclass(frozen=True)
class Failure:
    """What could not be measured, and why; `clients` is 0 where it never got so far."""

    case: str
    contender: str
    clients: int
    reason: str


@dataclass
class Results:
    """A run. `about` tells date, machine, commit, command and versions; `repeated_s`, what disturbed windows took."""

    about: dict[str, Any]
    points: list[Point] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    repeated_s: float = 0.0

    def point(self, case: str, contender: str, clients: int) -> Point:
        """The point of that name, made where there is none."""
        found = self.find(case, contender, clients)
        if found is None:
            found = Point(case, contender, clients)
            self.points.append(found)
        return found

    def find(self, case: str, contender: str, clients: int) -> Point | None:
        for point in self.points:
            if (point.case, point.contender, point.clients) == (case, contender, clients):
                return point
        return None

    def title(self, contender: str) -> str:
        """What a contender was called when it was measured."""
        return str(self.about.get("titles", {}).get(contender, contender))

    def failure(self, case: str, contender: str, clients: int) -> Failure | None:
        """Why there is no such point: its own failure, or that of the contender before it got there."""
        for failure in reversed(self.failures):
            if (failure.case, failure.contender) == (case, contender) and failure.clients in (0, clients):
                return failure
        return None

    def write(self, file: Path) -> None:
        """A line for each point, so that two runs can be compared."""
        stored = {**asdict(self), "repeated_s": round(self.repeated_s, 1)}
        points = [json.dumps(_rounded(point)) for point in stored.pop("points")]
        head = json.dumps(stored, indent=1).removesuffix("\n}")
        file.write_text(head + ',\n "points": [\n  ' + ",\n  ".join(points) + "\n ]\n}\n")

    @classmethod
    def read(cls, file: Path) -> Results:
        stored = json.loads(file.read_text())
        points = [Point(**{**point, "windows": [Window(**w) for w in point["windows"]]}) for point in stored["points"]]
        failures = [Failure(**failure) for failure in stored["failures"]]
        return cls(stored["about"], points, failures, stored["notes"], stored.get("repeated_s", 0.0))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list) else value
