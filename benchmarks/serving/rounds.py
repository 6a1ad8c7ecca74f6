"""The order of a run: rounds, in which every contender is measured in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving import machine
from benchmarks.serving.cases import CASES, Case
from benchmarks.serving.contender import YARDSTICK, contender
from benchmarks.serving.hosting import Failed, Host, Place
from benchmarks.serving.peers.install import missing
from benchmarks.serving.results import Failure, Results, Window

_GIVE_UP = 2  # failures at the same place after which a contender is not tried there again


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        cases, contenders: by name.
        clients: only these counts, where a case has them; all of its own without.
        rounds: how often everybody has a turn.
        window, warm_up: seconds.
        noise: cores that anything else may use before a window is thrown away.
        retries: windows thrown away before the quietest is kept and marked.
        patience: seconds to wait for quiet before a window is repeated.
    """

    cases: tuple[str, ...]
    contenders: tuple[str, ...]
    clients: tuple[int, ...]
    rounds: int
    window: float
    warm_up: float
    noise: float
    retries: int
    patience: float

    def counts(self, case: Case) -> tuple[int, ...]:
        return tuple(count for count in case.clients if not self.clients or count in self.clients)

    def turn(self, number: int) -> list[str]:
        """The contenders of a round: the yardstick first, the others beginning with another one each time."""
        others = [name for name in self.contenders if name != YARDSTICK]
        cut = number % len(others) if others else 0
        return [name for name in self.contenders if name == YARDSTICK] + others[cut:] + others[:cut]


def run(plan: Plan, place: Place, results: Results, file: Path, say: Callable[[str], None]) -> None:
    """Measure everything; `results` is written to `file` after every contender's turn."""
    for case in (CASES[name] for name in plan.cases):
        counts = plan.counts(case)
        if not counts:
            continue
        for number in range(plan.rounds):
            for name in plan.turn(number):
                if case.name in contender(name).cases:
                    _one_turn(plan, place, results, case, counts, number, name, say)
                    results.write(file)


def _one_turn(
    plan: Plan, place: Place, results: Results, case: Case, counts: tuple[int, ...], number: int, name: str,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    kind = contender(name)

    def fail(clients: int, reason: str) -> None:
        results.failures.append(Failure(case.name, name, clients, reason))
        say(f"{case.name:9} {name:20} {clients or '':>4} FAILED: {reason}")

    def failed(clients: int) -> int:
        return sum((f.case, f.contender, f.clients) == (case.name, name, clients) for f in results.failures)

    if kind.peer and (reason := missing(place.peers_dir, kind.peer)):
        if not failed(0):
            fail(0, reason)
        return
    if failed(0) >= _GIVE_UP:
        return
    for count in counts:
        if count > kind.most_clients and not failed(count):
            fail(count, kind.why_most)
    wanted = [count for count in counts if count <= kind.most_clients and failed(count) < _GIVE_UP]
    if not wanted:
        return
    for together in [[count] for count in wanted] if kind.restarts else [wanted]:
        _one_start(plan, place, results, case, together, number, name, say, fail)


def _one_start(
    plan: Plan, place: Place, results: Results, case: Case, counts: list[int], number: int, name: str,
    say: Callable[[str], None], fail: Callable[[int, str], None],
) -> None:  # fmt: skip
    """Start a contender, measure it with one number of clients after the other, stop it."""
    reached = 0
    host: Host | None = None
    try:
        host = Host(name, case, max(counts), place)
        with host:
            for count in counts:
                reached = count
                host.grow(count)
                window = _quiet_window(plan, host, results, case, count)
                point = results.point(case.name, name, count)
                if not host.kind.one_process:
                    point.unique_mib = host.unique_mib()
                say(
                    f"{case.name:9} {name:20} {count:4} round {number + 1}: {window.requests_per_s:9.0f} req/s  "
                    f"p50 {window.p50_us:8.0f}  p99 {window.p99_us:8.0f}  p99.9 {window.p999_us:8.0f} us  "
                    f"CPU {window.server_cpu_us:6.1f} + {window.client_cpu_us:6.1f} us/req  "
                    f"others {window.others_cores:.2f} ({window.loudest})  USS {point.unique_mib:.0f} MiB"
                )
    except Failed as error:
        fail(reached, str(error))
        if host is not None and host.log:
            say(host.log)
    finally:
        if host is not None:
            for note in host.notes:
                results.notes.append(f"{case.name}, round {number + 1}: {note}")
                say(note)


def _quiet_window(plan: Plan, host: Host, results: Results, case: Case, count: int) -> Window:
    """A window in which nothing else ran; the quietest of several, where the machine never was quiet."""
    point = results.point(case.name, host.name, count)
    tried: list[Window] = []
    while True:
        window = host.window(plan.window, plan.warm_up)
        if window.others_cores <= plan.noise:
            break
        tried.append(window)
        if len(tried) > plan.retries:
            window = min(tried, key=lambda one: one.others_cores)
            point.disturbed += 1
            point.thrown -= 1
            break
        wait_for_quiet(plan.noise, plan.patience)
    point.thrown += len(tried)
    point.windows.append(window)
    return window


def wait_for_quiet(noise: float, patience: float) -> bool:
    """Wait until others use less than `noise` cores for a second; False when they never did."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        first = machine.read()
        time.sleep(1.0)
        if machine.between(first, machine.read(), set()).others <= noise:
            return True
    return False
