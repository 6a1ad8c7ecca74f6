"""How the gateway's process ends: when, in which order, with which status, and what an uncaught error leads to."""

from __future__ import annotations

import asyncio

import pytest
from tests.loops import turns

from jurybox.server.gateway.process import _broke, _drained, _until
from jurybox.server.security.doors import Doors


class Server:
    """A server that runs until it is stopped, or by itself ends with or without a fault."""

    def __init__(self, order):
        self.order, self.ended = order, asyncio.get_running_loop().create_future()

    async def run(self):
        return await self.ended

    def stop(self):
        self.order.append("stop")
        if not self.ended.done():
            self.ended.set_result(True)


@pytest.mark.parametrize("many", [0, 2])
async def test_all_servers_are_stopped_on_request_after_what_was_not_answered_is_refused(many):
    stop, order = asyncio.Event(), []
    servers = [Server(order) for _ in range(many)]
    serving = asyncio.create_task(_until(stop, servers, lambda: order.append("refuse"), [asyncio.Event()]))
    await turns()
    assert not serving.done() and not order
    stop.set()
    assert await asyncio.wait_for(serving, 20) is True
    assert order == ["refuse"] + ["stop"] * many


@pytest.mark.parametrize("well", [True, False])
async def test_a_server_that_ends_by_itself_ends_the_others_and_its_fault_is_the_processes(well):
    order = []
    servers = [Server(order) for _ in range(2)]
    serving = asyncio.create_task(_until(asyncio.Event(), servers, lambda: order.append("refuse"), []))
    await turns()
    servers[1].ended.set_result(well)
    assert await asyncio.wait_for(serving, 20) is well
    assert order == ["refuse", "stop", "stop"]


async def test_a_door_of_another_kind_that_ends_by_itself_is_a_fault():
    order, ends = [], [asyncio.Event(), asyncio.Event()]
    serving = asyncio.create_task(_until(asyncio.Event(), [Server(order)], lambda: order.append("refuse"), ends))
    await turns()
    ends[1].set()
    assert await asyncio.wait_for(serving, 20) is False
    assert order == ["refuse", "stop"]


class Door:
    busy = True


class Pipe:
    def __init__(self, order):
        self.order = order

    def send(self, kind):
        self.order.append(kind)


async def test_a_drain_ends_the_streams_and_is_reported_when_no_door_is_busy_any_more():
    doors, order, one, other = Doors(), [], Door(), Door()
    drained = asyncio.create_task(_drained(doors, [one, other], lambda: order.append("streams"), Pipe(order)))
    await turns()
    assert not order
    doors.close()
    await turns()
    one.busy = False
    await turns()
    assert order == ["streams"]
    other.busy = False
    await asyncio.wait_for(drained, 20)
    assert order == ["streams", "drained"]


class Noting:
    """A log, and a frontend whose answers may be in doubt."""

    def __init__(self):
        self.logged, self.doubts = [], 0

    def error(self, event, *, what, error, exc_info):
        self.logged.append((event, what, error, exc_info))

    def doubt(self):
        self.doubts += 1


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), BrokenPipeError(), BlockingIOError()])
def test_a_client_that_has_disconnected_is_no_fault_of_the_gateway(error):
    noting = Noting()
    _broke({"message": "m", "exception": error, "handle": object()}, noting, noting)
    assert not noting.logged and not noting.doubts


@pytest.mark.parametrize("handle", [True, False])
def test_an_uncaught_error_is_logged_and_where_a_callback_raised_it_an_answer_may_be_lost(handle):
    noting, error = Noting(), ValueError("wrong")
    _broke({"message": "in a callback", "exception": error, **({"handle": None} if handle else {})}, noting, noting)
    ((event, what, said, cause),) = noting.logged
    assert (event, what, cause) == ("unexpected", "in a callback", error) and "wrong" in said
    assert noting.doubts == handle


def test_a_fault_without_an_exception_is_logged_too():
    noting = Noting()
    _broke({}, noting, noting)
    assert noting.logged == [("unexpected", "", "", None)] and not noting.doubts
