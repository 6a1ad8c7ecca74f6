"""How often the frontend tries a request, on which lanes, what it makes of the errors, and what it records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.clocks import Clock, given

from jurybox.client import Busy, ModelFailed, ModelNotFound, RowFailed, ServerGone, SessionLost, SpecMismatch, Timeout
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.errors import Code, Refused
from jurybox.server.frontend import frontend as module
from jurybox.server.frontend.frontend import Frontend, deadline
from jurybox.server.frontend.lanes import MOMENT, SOON
from jurybox.server.frontend.requests import ReadRows, RowsRequest, Steps

ONE = TensorSpec("float32", ())
SPEC = ModelSpec("m", {"x": ONE}, {"score": ONE})
TWO = ModelSpec("m", {"x": ONE}, {"score": ONE, "mark": ONE})
KEEPING = ModelSpec("m", {"x": ONE}, {"score": ONE}, {"h": ONE})
STALE, GONE = Refused("taken back", Code.STALE_LEASE), ServerGone("gone")
ROW = np.float32([3])


class Tries:
    """Lanes: each request on one is answered, or raises the next of these errors."""

    def __init__(self, *errors: Exception, spec: ModelSpec = SPEC, rows: int = 4, makeshift: bool = False) -> None:
        self.errors, self.spec, self.rows, self.makeshift = list(errors), spec, rows, makeshift
        self.version = 7
        self.waited: list[tuple[str, float, int]] = []
        self.asked: list[tuple[Any, ...]] = []
        self.retired: list[Any] = []
        self.lane: Any = None

    def held(self, name: str, priority: int) -> None:
        """No lane is ready: each request waits for one."""

    async def hold_soon(self, name: str, until: float, priority: int) -> Any:
        self.waited.append((name, until, priority))
        if self.lane is None or self.lane in self.retired or self.makeshift:
            free = list(range(self.rows))
            model = SimpleNamespace(max_batch=8)
            self.lane = SimpleNamespace(
                spec=self.spec, makeshift=self.makeshift, model=model, free=free, rows=self.rows, callers=Counter()
            )
            self.rows += 1
        return self.lane

    async def ask(self, held: Any, inputs: Any, n: int, left: float, version: int, client: Any) -> Any:
        self.asked.append((n, left, version, client))
        if self.errors:
            raise self.errors.pop(0)
        return {"score": 2 * inputs["x"]}, self.version

    async def ask_sessions(self, held: Any, inputs: Any, slots: Any, begin: Any, left: float, version: int) -> Any:
        return await self.ask(held, inputs, len(slots), left, version, begin)

    def retire(self, held: Any) -> None:
        self.retired.append(held)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return given(Clock(1000.0), monkeypatch, module)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The pauses, of which none is made."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep))
    yield slept


def frontend(lanes: Tries) -> tuple[Frontend, list[tuple[str, bool]]]:
    made, outcomes = Frontend("ipc:///nowhere", None), list[tuple[str, bool]]()  # type: ignore[arg-type]
    made.lanes, made.record_outcome = lanes, lambda model, answered: outcomes.append((model, answered))  # type: ignore
    return made, outcomes


def request(until: float = 1e9, reads: list[ModelSpec] | None = None, **more: Any) -> RowsRequest:
    def read(spec: ModelSpec, partial: bool) -> ReadRows:
        assert not partial
        if reads is not None:
            reads.append(spec)
        return ReadRows({"x": ROW}, 1)

    return RowsRequest("m", read, until, **more)


async def test_an_answer_has_outputs_version_and_spec_and_is_recorded(clock: Clock) -> None:
    lanes = Tries()
    made, outcomes = frontend(lanes)
    reply = await made.compute(request(until=1060.0, priority=1, client="client"))  # type: ignore[arg-type]
    assert (reply.outputs["score"].tolist(), reply.version, reply.spec, reply.failed, reply.lost) == (
        [6], 7, SPEC, {}, (),
    )  # fmt: skip
    assert lanes.asked == [(1, 60.0, 0, "client")] and outcomes == [("m", True)]
    assert lanes.waited == [("m", 1000.0 + MOMENT, 1)]
    await made.compute(request(until=1001.0, version=7))
    assert lanes.waited[1] == ("m", 1001.0 - SOON, 2), "it does not wait for rows beyond its own time"
    assert lanes.asked[1] == (1, 1.0, 7, None)


@pytest.mark.parametrize(("stale", "tries"), [(1, 2), (2, 3), (3, 3)])
async def test_a_request_is_tried_on_three_lanes_and_read_for_each(stale: int, tries: int) -> None:
    lanes, reads = Tries(*[STALE] * stale), list[ModelSpec]()
    made, outcomes = frontend(lanes)
    if stale < 3:
        assert (await made.compute(request(reads=reads))).version == 7
    else:
        with pytest.raises(Refused, match="taken back"):
            await made.compute(request(reads=reads))
    assert len(lanes.waited) == len(lanes.asked) == len(reads) == tries
    assert outcomes == [("m", stale < 3)] and not lanes.retired, "its coalescer gives it up"
    assert len({until for _, until, _ in lanes.waited}) == 1, "all of them together wait a moment"


@pytest.mark.parametrize("error", [GONE, ModelFailed("no"), Busy("full"), Timeout("late")])
async def test_another_error_is_raised_at_once_and_recorded(error: Exception) -> None:
    lanes = Tries(error)
    made, outcomes = frontend(lanes)
    with pytest.raises(type(error), match=str(error)):
        await made.compute(request())
    assert len(lanes.asked) == 1 and outcomes == [("m", False)]


async def test_failed_rows_are_data_by_the_names_of_outputs() -> None:
    for spec, outputs in ((SPEC, ROW), (TWO, {"score": ROW, "mark": ROW})):
        made, outcomes = frontend(Tries(RowFailed("some failed", None, {0: "why"}, outputs, 5), spec=spec))
        reply = await made.compute(request())
        assert set(reply.outputs) == set(spec.outputs) and all(rows is ROW for rows in reply.outputs.values())
        assert (reply.failed, reply.version, outcomes) == ({0: "why"}, 5, [("m", True)] * 2)
    made, outcomes = frontend(Tries(RowFailed("rejected")))
    with pytest.raises(RowFailed, match="rejected"):
        await made.compute(request())
    assert outcomes == [("m", True)], "a model that rejects rows has answered"


async def test_an_answer_of_another_version_is_none() -> None:
    made, outcomes = frontend(Tries())
    with pytest.raises(ModelNotFound, match="version 6 of 'm' is not held, 7 is the newest"):
        await made.compute(request(version=6))
    assert not outcomes
    made.lanes.version = 0  # type: ignore[attr-defined]
    assert (await made.compute(request(version=0))).version == 0


@pytest.mark.parametrize(("spec", "steps"), [(SPEC, Steps(((1,),), (0,))), (KEEPING, None)])
async def test_sequences_are_of_models_with_state_and_of_no_others(spec: ModelSpec, steps: Steps | None) -> None:
    lanes = Tries(spec=spec)
    made, _ = frontend(lanes)
    error, says = (Refused, "keeps no state between") if steps else (SpecMismatch, r"keeps state \(h\): expected")
    with pytest.raises(error, match=says) as caught:
        await made.compute(request(steps=steps))
    assert not lanes.asked and caught.value.code == (Code.UNSUPPORTED if steps else Code.SPEC_MISMATCH)


def stepping(step: int, *, reports: bool = False) -> RowsRequest:
    return request(steps=Steps((("c", 1),) if reports else ((1,),), (step,), False, reports))


@pytest.mark.parametrize("error", [STALE, GONE])
@pytest.mark.parametrize("reports", [False, True])
async def test_a_sequence_whose_lane_is_gone_is_lost_unless_it_begins(error: Any, reports: bool) -> None:
    lanes = Tries(error, spec=KEEPING)
    made, outcomes = frontend(lanes)
    if error is GONE:
        with pytest.raises(ServerGone):
            await made.compute(stepping(0, reports=reports))
        assert len(lanes.retired) == 1 and outcomes == [("m", False)]
        return
    assert (await made.compute(stepping(0, reports=reports))).version == 7
    assert len(lanes.retired) == 1 and len(lanes.asked) == 2 and outcomes == [("m", True)]
    assert (await made.compute(stepping(1, reports=reports))).version == 7
    lanes.errors = [STALE]
    if reports:
        reply = await made.compute(stepping(2, reports=True))
        assert (reply.outputs, reply.version, reply.lost) == ({}, 0, [0])
    else:
        with pytest.raises(SessionLost, match="has no state here"):
            await made.compute(stepping(2))
    assert len(lanes.retired) == 2 and len(lanes.asked) == 4, "a step is not computed without its state"
    assert len(lanes.waited) == 4, "no lane is waited for"


async def test_a_model_that_fails_keeps_its_lane() -> None:
    lanes = Tries(ModelFailed("no"), spec=KEEPING)
    made, _ = frontend(lanes)
    with pytest.raises(ModelFailed):
        await made.compute(stepping(0))
    assert not lanes.retired


async def test_a_new_sequence_waits_a_moment_for_a_larger_lane_and_no_longer(clock: Clock, soon: list[float]) -> None:
    lanes = Tries(spec=KEEPING, rows=0, makeshift=True)
    made, outcomes = frontend(lanes)
    assert (await made.compute(stepping(0))).version == 7
    assert soon == [SOON] and len(lanes.waited) == 2 and outcomes == [("m", True)]
    full = Tries(spec=KEEPING, rows=0)
    made, outcomes = frontend(full)
    with pytest.raises(Busy, match="sequences of model"):
        await made.compute(stepping(0))
    assert len(full.waited) == 1 and outcomes == [("m", False)]
    late = Tries(spec=KEEPING, rows=-9, makeshift=True)
    made, outcomes = frontend(late)
    hold = late.hold_soon

    async def slowly(*arguments: Any) -> Any:
        clock.now += MOMENT / 2
        return await hold(*arguments)

    late.hold_soon = slowly  # type: ignore[method-assign]
    with pytest.raises(Busy, match="sequences of model"):
        await made.compute(stepping(0))
    assert len(late.waited) == 3 and outcomes == [("m", False)]


async def test_a_patient_request_waits_for_rows_until_its_time_is_over(clock: Clock, soon: list[float]) -> None:
    made, _ = frontend(Tries())

    async def busy(*_: Any) -> Any:
        clock.now += 1
        raise Busy("no row is free")

    made.lanes.hold_soon = busy  # type: ignore[method-assign]
    with pytest.raises(Busy, match="no row is free"):
        await made.compute(request(until=1003.0, patient=True))
    assert len(soon) == 3
    with pytest.raises(Busy):
        await made.compute(request(until=2000.0))
    assert len(soon) == 3


@pytest.mark.parametrize(
    ("seconds", "left"), [((), 60.0), ((None,), 60.0), ((5.0, None, 3.0), 3.0), ((100.0,), 60.0), ((0.0,), 0.0)]
)
def test_a_request_waits_as_long_as_it_says_and_a_minute_at_most(clock: Clock, seconds: Any, left: float) -> None:
    assert deadline(*seconds) == 1000.0 + left
