"""The gateway's lanes: how long a request waits for the rows of a gateway that has died."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from jurybox.client import Busy, Refused
from jurybox.protocol.errors import Code
from jurybox.server.frontend.lanes import ModelRows


def lane(name: str, *, exchanged: bool = False) -> SimpleNamespace:
    return SimpleNamespace(name=name, may_be_exchanged=exchanged, retired=False)


FEW, MANY = lane("few rows", exchanged=True), lane("many rows")
LOADING = Refused("model 'sum' is loading", Code.NOT_READY)


def held_soon(monkeypatch: pytest.MonkeyPatch, answers: Sequence[object], seconds: float = 10.0) -> object:
    """What `hold_soon` gives where `hold` answers so, one after another and then the last again and again."""
    lanes = ModelRows("ipc:///nowhere")
    left = list(answers)

    async def hold(name, *, trying=False, priority=2):
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(lanes, "hold", hold)
    try:
        return asyncio.run(lanes.hold_soon("sum", time.monotonic() + seconds))
    finally:
        lanes.close()


def test_a_request_waits_until_rows_are_free(monkeypatch):
    assert held_soon(monkeypatch, [Busy("none is free"), Busy("none is free"), MANY]) is MANY
    with pytest.raises(Busy):
        held_soon(monkeypatch, [Busy("none is free")], 0.1)


def test_errors_that_a_new_lane_cannot_fix_are_raised_at_once(monkeypatch):
    with pytest.raises(Refused, match="loading"):
        held_soon(monkeypatch, [LOADING, MANY])


def test_a_lane_of_few_rows_is_exchanged_or_serves_if_there_is_no_other(monkeypatch):
    assert held_soon(monkeypatch, [FEW, FEW, MANY]) is MANY
    assert held_soon(monkeypatch, [FEW], 0.1) is FEW


def test_while_no_engine_serves_a_lane_of_few_rows_is_kept(monkeypatch):
    """A request on it waits for the engine; if refused, it would fail although health has just reported ready."""
    assert held_soon(monkeypatch, [FEW, LOADING, LOADING, MANY]) is MANY
    assert held_soon(monkeypatch, [FEW, LOADING], 0.1) is FEW


def test_a_lane_of_few_rows_that_was_given_up_meanwhile_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = lane("few rows", exchanged=True)
    given_up.retired = True
    with pytest.raises(Refused, match="loading"):
        held_soon(monkeypatch, [given_up, LOADING, MANY])
    assert held_soon(monkeypatch, [given_up, Busy("none is free"), MANY]) is MANY


def test_the_connection_of_lanes_ends_with_them():
    closed, lanes = [], ModelRows("ipc:///nowhere")
    lanes._server = SimpleNamespace(close=lambda: closed.append("server"))
    lanes.close()
    lanes._thread.shutdown()
    assert closed == ["server"]
    ModelRows("ipc:///nowhere")._disconnect()  # there is none yet


async def test_a_lane_that_a_larger_one_replaces_is_let_go(monkeypatch):
    lanes, released, key = ModelRows("ipc:///nowhere"), [], ("sum", 2)
    monkeypatch.setattr(lanes, "let_go", released.append)
    earlier, later = lane("few rows", exchanged=True), lane("many rows")
    for held in (earlier, later, later):
        done = asyncio.get_running_loop().create_future()
        done.set_result(held)
        lanes._leased(key, done)
    assert (released, earlier.retired, later.retired, lanes._held[key]) == ([earlier], True, False, later)
    lanes.close()


async def test_a_lane_is_held_for_its_priority_alone_unless_a_larger_one_is_wanted(monkeypatch):
    lanes, made = ModelRows("ipc:///nowhere"), []

    def leased(key, trying, earlier):
        made.append(SimpleNamespace(key=key, makeshift=trying, has_sequence=False, largest_until=0.0))
        return made[-1]

    monkeypatch.setattr(lanes, "_lease", leased)
    assert lanes.held("sum") is None
    one = await lanes.hold("sum")
    assert lanes.held("sum") is one and lanes.held("sum", 1) is None and lanes.held("product") is None
    first = await lanes.hold("sum", priority=1)
    assert lanes.held("sum", 1) is first is not one and lanes.held("sum", 2) is one
    assert await lanes.hold("sum") is one and len(made) == 2, "a lane is leased once"
    await lanes.hold("probed", trying=True)
    assert lanes.held("probed") is None, "its few rows are for a probe: the next request leases more"
    lanes.close()
