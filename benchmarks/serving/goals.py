"""What Jurybox wants to reach, as ratios to what was measured beside it in the same run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.serving.cases import CASES
from benchmarks.serving.contender import YARDSTICK
from benchmarks.serving.results import Results

_NATIVE, _ZMQ, _EXPORTED = "jurybox-native", "jurybox-zmq", "jurybox-native-exported"


@dataclass(frozen=True)
class Goal:
    """A sentence, the bound it sets, and what was found; None where the run lacks a figure for it."""

    says: str
    bound: float
    at_least: bool
    found: float | None
    unit: str

    @property
    def met(self) -> bool | None:
        if self.found is None:
            return None
        return self.found >= self.bound if self.at_least else self.found <= self.bound


def goals(results: Results) -> list[Goal]:
    """All goals, in order."""

    def figure(case: str, name: str, clients: int, what: str = "requests_per_s") -> float | None:
        point = results.find(case, name, clients)
        return point.median(what) if point is not None and point.windows else None

    def both(one: float | None, other: float | None, how: Callable[[float, float], float]) -> float | None:
        return how(one, other) if one is not None and other is not None else None

    def ratio(one: float | None, other: float | None) -> float | None:
        return both(one, other, lambda a, b: a / b)

    def least(found: list[float | None]) -> float | None:
        return min((value for value in found if value is not None), default=None)

    behind = [
        ratio(figure(case.name, _ZMQ, clients), figure(case.name, YARDSTICK, clients))
        for case in CASES.values()
        for clients in case.clients
    ]
    sizes = [point.unique_mib for point in results.points if point.contender in (_NATIVE, _ZMQ) and point.clients >= 4]
    p99 = [figure("vector", name, 16, "p99_us") for name in (_NATIVE, YARDSTICK)]
    p50 = [figure("vector", name, 1, "p50_us") for name in (_NATIVE, "limit")]
    found = [
        Goal("shm transport, vector, 16 clients: throughput over plain ZeroMQ", 2.8, True,
             ratio(figure("vector", _NATIVE, 16), figure("vector", YARDSTICK, 16)), "x"),
        Goal("shm transport, vector, 16 clients: p99 over plain ZeroMQ's", 0.5, False, ratio(*p99), "x"),
        Goal("shm transport, vector, 1 client: p50 above the in-process forward", 25.0, False,
             both(p50[0], p50[1], lambda a, b: a - b), "us"),
        Goal("shm transport, vector: throughput at 256 clients over that at 16", 0.8, True,
             ratio(figure("vector", _NATIVE, 256), figure("vector", _NATIVE, 16)), "x"),
        Goal("ZeroMQ transport: throughput over plain ZeroMQ, the least of all cases", 1.0, True, least(behind), "x"),
    ]  # fmt: skip
    found.append(
        Goal("shm transport, vector, 4 clients: throughput over a copy in every client", 0.8, True,
             ratio(figure("vector", _NATIVE, 4), figure("vector", "own-copy", 4)), "x")
    )  # fmt: skip
    found.append(
        Goal("shm transport with export = true, vector, 1 client: p50 above the in-process forward", 25.0, False,
             both(figure("vector", _EXPORTED, 1, "p50_us"), p50[1], lambda a, b: a - b), "us")
    )  # fmt: skip
    for own in ("own-copy", "own-copy-exported"):
        kind = "a copy" if own == "own-copy" else "an exported copy"
        says = f"shm transport with export = true, vector, 4 clients: throughput over {kind} in every client"
        value = ratio(figure("vector", _EXPORTED, 4), figure("vector", own, 4))
        found.append(Goal(says, 0.8, True, value, "x"))
    for says, ours, theirs, bound, asked in (
        ("gRPC: throughput over Triton's", "jurybox-grpc", "triton-grpc", 1.2, ("vector", "image")),
        ("tcp://: throughput over plain ZeroMQ over TCP", "jurybox-tcp", "plain-zmq-tcp", 0.9, ("vector", "image")),
        ("HTTP with binary tensors: throughput over mosec's", "jurybox-http", "mosec", 1.0, ("vector",)),
    ):
        ratios = [ratio(figure(case, ours, n), figure(case, theirs, n)) for case in asked for n in (1, 4, 16)]
        found.append(Goal(f"{says}, {' and '.join(asked)}, the least of 1, 4 and 16 clients", bound, True,
                          least(ratios), "x"))  # fmt: skip
    for name in (_NATIVE, _ZMQ):
        transport = "native" if name == _NATIVE else "ZeroMQ"
        for case_name, clients, bound in (("image", 16, 0.97), ("image", 4, 0.93), ("vector64", 4, 0.90)):
            says = f"{transport} transport, {case_name}, {clients} clients: throughput over the limit at that batch"
            value = ratio(figure(case_name, name, clients), figure(case_name, "limit", clients))
            found.append(Goal(says, bound, True, value, "x"))
    found.append(
        Goal("a client's unique memory, the most of both transports", 45.0, False, max(sizes, default=None), "MiB")
    )
    return found
