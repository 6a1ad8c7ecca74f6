"""The order of a run: rounds, in which every contender is measured in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving import machine
from benchmarks.serving.cases import CASES, Case
from benchmarks.serving.contender import CONTENDERS, YARDSTICK, contender
from benchmarks.serving.hosting import Failed, Host, Place
from benchmarks.serving.peers.install import missing
from benchmarks.serving.results import Failure, Results, Window

# Who is asked with how many clients, by case: everything, and what says most in twenty minutes on two cores.
FULL = {case.name: (tuple(CONTENDERS), case.clients) for case in CASES.values()}
BENCH = {
    "vector": (
        ("limit", "own-copy", "own-copy-exported", "plain-zmq", "plain-zmq-tcp", "jurybox-native",
         "jurybox-native-exported", "jurybox-zmq", "jurybox-tcp", "jurybox-http", "jurybox-grpc", "queue-pool", "mosec",
         "triton-grpc", "torchrl"),
        (1, 4, 16),
    ),
    "vector64": (("limit", "own-copy", "plain-zmq", "jurybox-native", "jurybox-native-exported"), (4,)),
    "image": (
        ("own-copy", "plain-zmq", "plain-zmq-tcp", "jurybox-native", "jurybox-tcp", "jurybox-grpc", "triton-grpc"),
        (4,),
    ),
}  # fmt: skip
SETS = {"bench": BENCH, "full": FULL}

_GIVE_UP = 2  # failures at the same place after which a contender is not tried there again


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        asked: contenders and numbers of clients, by case.
        rounds: how often everybody has a turn.
        window, warm_up: seconds.
        noise: cores that anything else may use before a window is thrown away.
        retries: windows thrown away before the quietest is kept and marked.
        patience: seconds to wait for quiet before a window is repeated.
        spare: seconds that all of this repeating may take in a run; afterwards noisy windows are kept and marked.
    """

    asked: Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]]
    rounds: int
    window: float
    warm_up: float
    noise: float
    retries: int
    patience: float
    spare: float

    @property
    def contenders(self) -> list[str]:
        """All that are asked in any case, in the order of the tables."""
        return [name for name in CONTENDERS if any(name in names for names, _ in self.asked.values())]

    def turn(self, case: str, number: int) -> list[str]:
        """The contenders of a round: the yardstick first, the others beginning with another one each time."""
        names, _ = self.asked[case]
        others = [name for name in names if name != YARDSTICK]
        cut = number % len(others) if others else 0
        return [name for name in names if name == YARDSTICK] + others[cut:] + others[:cut]


def run(plan: Plan, place: Place, results: Results, file: Path, say: Callable[[str], None]) -> None:
    """Measure everything; `results` is written to `file` after every contender's turn."""
    for case in (CASES[name] for name in plan.asked):
        _, counts = plan.asked[case.name]
        for number in range(plan.rounds):
            for name in plan.turn(case.name, number):
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
                window = quiet_window(plan, host, results, count)
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


def quiet_window(plan: Plan, host: Host, results: Results, count: int, beside: Sequence[Host] = ()) -> Window:
    """A window in which nothing else ran; the quietest of several, where the machine never was quiet."""
    point = results.point(host.case.name, host.name, count)
    tried: list[Window] = []
    while True:
        began = time.monotonic()
        window = host.window(plan.window, plan.warm_up, beside)
        if window.others_cores <= plan.noise:
            break
        tried.append(window)
        if len(tried) > plan.retries or results.repeated_s > plan.spare:
            window = min(tried, key=lambda one: one.others_cores)
            point.disturbed += 1
            point.thrown -= 1
            break
        wait_for_quiet(plan.noise, plan.patience)
        results.repeated_s += time.monotonic() - began
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
