"""Rows that a door keeps for its clients: when they are leased, tried again or given back, and which state is lost."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jurybox.client import Busy, ModelFailed, SessionLost, SpecMismatch, Timeout
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.errors import Code, Refused
from jurybox.server.frontend.requests import ReadRows, RowsRequest
from jurybox.server.frontend.reserved import ReservedRows

ONE = TensorSpec("float32", ())
SPEC = ModelSpec("m", {"x": ONE}, {"y": ONE})
KEEPING = ModelSpec("m", {"x": ONE}, {"y": ONE}, {"h": ONE})
STALE = Refused("taken back", Code.STALE_LEASE)


class Reserving:
    """Lanes that note what they are asked; requests raise the next of `errors`, if there is one."""

    def __init__(self, spec: ModelSpec = SPEC, *errors: Exception | None) -> None:
        self.spec, self.errors = spec, list(errors)
        self.reserved: list[Any] = []
        self.asked: list[Any] = []
        self.retired: list[Any] = []
        self.left: list[int] = []
        self.seconds: list[float] = []

    async def reserve(self, name: str, rows: int, seconds: float, returns: Any, priority: int) -> Any:
        await asyncio.sleep(0)
        model = SimpleNamespace(spec=self.spec, max_batch=8, requests=SimpleNamespace(lane=SimpleNamespace(engines=2)))
        held = SimpleNamespace(
            model=model, spec=self.spec, retired=False, sessions=object() if self.spec.state else None,
            coalescer=SimpleNamespace(left=self.left.append), group=returns(model),
        )  # fmt: skip
        self.reserved.append((name, rows, seconds, priority, held))
        return held

    @property
    def lane(self) -> Any:
        return self.reserved[-1][-1]

    async def ask(self, held: Any, inputs: Any, n: int, left: float, version: int, place: int) -> Any:
        assert held is self.lane and version == 0
        self.asked.append((n, place))
        self.seconds.append(left)
        if self.errors and (error := self.errors.pop(0)) is not None:
            if error is STALE:
                held.retired = True
            raise error
        return {"y": inputs["x"]}, 7

    async def ask_sessions(
        self, held: Any, inputs: Any, sessions: list[int], begin: list[bool], left: float, version: int, place: int
    ) -> Any:
        assert sessions == [place]
        answer = await self.ask(held, inputs, 1, left, version, place)
        self.asked[-1] = (*self.asked[-1], begin)
        return answer

    def retire(self, held: Any) -> None:
        held.retired = True
        self.retired.append(held)


def rows(lanes: Reserving, **more: Any) -> ReservedRows:
    return ReservedRows(lanes, "m", 5, 30.0, **more)  # type: ignore[arg-type]


def request(n: int = 1, seconds: float = 60.0) -> RowsRequest:
    return RowsRequest("m", lambda spec, _: ReadRows({"x": np.zeros(n)}, n), time.monotonic() + seconds)


async def test_rows_are_leased_once_with_the_first_request_for_every_place() -> None:
    lanes, waited = Reserving(), list[Any]()
    mine = rows(lanes, priority=1, waited=waited.append)
    assert mine.known is None and not lanes.reserved
    mine.left(3)
    found = await asyncio.gather(*(mine.compute(request(), place, begins=False) for place in (0, 1)), mine.spec())
    assert found[2] is SPEC and mine.known is SPEC and len(lanes.reserved) == 1
    assert lanes.reserved[0][:4] == ("m", 5, 30.0, 1) and lanes.asked == [(1, 0), (1, 1)]
    reply = found[0]
    assert (reply.outputs["y"].tolist(), reply.version, reply.spec) == ([0], 7, SPEC)
    assert all(0 < seconds <= 60 for seconds in lanes.seconds)
    mine.left(3)
    assert lanes.left == [3]
    lanes.lane.group.went(lambda: [0.5])
    assert waited == [[0.5]]
    await mine.compute(request(seconds=-5), 0, begins=False)
    assert lanes.seconds[-1] == 0.0


async def test_rows_are_given_back_once_and_leased_again_with_the_next_request() -> None:
    lanes = Reserving()
    mine = rows(lanes)
    mine.close()
    await mine.spec()
    mine.close()
    mine.close()
    assert lanes.retired == [lanes.lane] and mine.known is None
    await mine.compute(request(), 0, begins=False)
    assert len(lanes.reserved) == 2


async def test_a_model_that_is_loaded_again_with_another_spec_gets_a_lane_of_it() -> None:
    lanes = Reserving()
    mine = rows(lanes)
    await mine.spec()
    first = lanes.lane
    lanes.spec = first.model.spec = ModelSpec("m", {"x": ONE}, {"y": ONE, "z": ONE})
    assert await mine.spec() is lanes.spec and mine.known is lanes.spec
    assert lanes.retired == [first] and len(lanes.reserved) == 2
    await mine.spec()
    assert len(lanes.reserved) == 2


@pytest.mark.parametrize(("spec", "begins"), [(SPEC, False), (KEEPING, True)])
@pytest.mark.parametrize(("stale", "answered"), [(2, True), (3, False)])
async def test_a_request_is_tried_on_three_lanes(spec: ModelSpec, begins: bool, stale: int, answered: bool) -> None:
    lanes = Reserving(spec, *[STALE] * stale)
    asking = rows(lanes).compute(request(), 2, begins=begins)
    if answered:
        assert (await asking).version == 7
    else:
        with pytest.raises(Refused, match="taken back"):
            await asking
    assert len(lanes.reserved) == len(lanes.asked) == 3


@pytest.mark.parametrize("error", [Refused("no", Code.DRAINING), Busy("full"), ModelFailed("no"), Timeout("late")])
async def test_another_error_is_raised_at_once(error: Exception) -> None:
    lanes = Reserving(SPEC, error)
    with pytest.raises(type(error), match=str(error)):
        await rows(lanes).compute(request(), 2, begins=False)
    assert len(lanes.asked) == 1


async def test_a_state_whose_rows_were_taken_back_is_lost_until_an_episode_begins() -> None:
    lanes = Reserving(KEEPING, STALE)
    mine = rows(lanes)
    with pytest.raises(SessionLost, match="'m' is lost: its rows were taken back; begin another") as lost:
        await mine.compute(request(), 2, begins=False)
    assert lost.value.sessions == [2] and len(lanes.asked) == 1
    assert (await mine.compute(request(), 2, begins=True)).version == 7
    assert lanes.asked[-1] == (1, 2, [True])


async def test_after_a_time_out_a_state_is_unknown_until_an_episode_begins() -> None:
    lanes = Reserving(KEEPING, Timeout("late"))
    mine = rows(lanes)
    with pytest.raises(Timeout):
        await mine.compute(request(), 2, begins=False)
    with pytest.raises(SessionLost, match="an answer did not arrive in time") as lost:
        await mine.compute(request(), 2, begins=False)
    assert lost.value.sessions == [2] and len(lanes.asked) == 1
    await mine.compute(request(), 1, begins=False)
    for begins in (True, False):
        await mine.compute(request(), 2, begins=begins)
    assert [asked[1:] for asked in lanes.asked[1:]] == [(1, [False]), (2, [True]), (2, [False])]


async def test_a_state_has_one_row_and_a_model_without_takes_several() -> None:
    lanes = Reserving(KEEPING)
    with pytest.raises(SpecMismatch, match="expected one row an observation, came 2"):
        await rows(lanes).compute(request(2), 0, begins=True)
    assert not lanes.asked
    lanes = Reserving(SPEC, Timeout("late"))
    mine = rows(lanes)
    with pytest.raises(Timeout):
        await mine.compute(request(2), 0, begins=False)
    assert (await mine.compute(request(2), 0, begins=False)).version == 7, "there is no state to lose"
    assert lanes.asked == [(2, 0)] * 2
