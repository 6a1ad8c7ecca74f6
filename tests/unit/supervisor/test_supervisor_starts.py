"""How a supervisor comes to be: its address, the memory of its server, and what wakes its loop."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from tests.serving import segments
from tests.unit.supervisor.played_children import Server

from jurybox.protocol.errors import Refused
from jurybox.protocol.scoreboard import LANE_LOCK
from jurybox.protocol.segment import Segment, try_lock, unlock
from jurybox.server.logs import LEVELS, Log
from jurybox.server.settings.config import Configuration
from jurybox.server.supervisor import supervisor as supervisor_module
from jurybox.server.supervisor.control import Events
from jurybox.server.supervisor.supervisor import Supervisor


@pytest.mark.usefixtures("empty_shared_memory")
def test_an_address_that_cannot_be_bound_is_refused_with_the_reason_and_leaves_no_memory_and_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"ipc://{tmp_path}/no-such-folder/engine"
    settings = Configuration.model_validate({"server": {"address": address, "http": "", "grpc": ""}, "models": {}})
    ours, theirs = socket.socketpair()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    monkeypatch.setattr(supervisor_module, "zmq", SimpleNamespace(**{**vars(zmq), "Context": lambda: context}))
    try:
        with ours, theirs, pytest.raises(Refused) as refused:
            Supervisor(settings, ours, Log("supervisor", LEVELS["error"], str, sys.stderr), Events())
        assert str(refused.value).startswith(f"cannot bind {address}: No such file or directory")
        assert not segments() and context.closed
    finally:
        context.destroy(linger=0)


def test_clients_find_the_servers_memory_by_its_name_until_the_server_ends(server: Callable[..., Server]) -> None:
    world = server()
    name = world.supervisor._scoreboard.segment.name
    Segment.attach(name).close()
    world.closed_already = True
    world.supervisor._close()
    with pytest.raises(Exception, match=name):
        Segment.attach(name)


def test_servers_just_killed_get_some_seconds_to_lose_their_locks_before_their_memory_is_looked_for(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_DEAD_BY_THEN", 1000.0)
    swept = list[str]()
    monkeypatch.setattr(supervisor_module, "sweep", lambda: swept.append("once") or [])
    world = server()
    now = world.tick()
    assert not swept
    world.supervisor._tick(now + 1000.0)
    assert swept == ["once"] and not world.logged("removed shared memory of dead owners")


def test_a_lane_that_its_client_has_locked_is_not_taken_back(server: Callable[..., Server]) -> None:
    world = server()
    world.serves()
    held = world.models["m"]
    lanes = [world.supervisor._leases.grant(held.index, 1, 32, held.arena_number) for _ in range(3)]
    with Segment.attach(world.supervisor._scoreboard.segment.name, writable=True) as client:
        for lane in lanes:
            lane.granted -= 60.0
        assert try_lock(client.fd, LANE_LOCK + lanes[1].lane)
        world.tick()
        assert [line["lane"] for line in world.logged("client gone, rows taken back")] == [0, 2]
        unlock(client.fd, LANE_LOCK + lanes[1].lane)
        world.tick()
    assert [line["lane"] for line in world.logged("client gone, rows taken back")] == [0, 2, 1]


class Loop:
    """Turns of a running loop, at each of which the test first does the next thing."""

    def __init__(self, world: Server, monkeypatch: pytest.MonkeyPatch, *things: Callable[[], object]) -> None:
        self.things, self.listen = list(things), world.supervisor._listen
        world.supervisor._poller = zmq.Poller()
        world.closed_already = True
        monkeypatch.setattr(world.supervisor, "_listen", self.turn)

    def turn(self, timeout: float) -> None:
        assert self.things, "it goes on"
        self.things.pop(0)()
        self.listen(0.0)


def nothing() -> None:
    pass


def said(world: Server) -> list[str]:
    return [line["event"] for line in world.lines if line["level"] != "debug"]


def test_a_signal_ends_a_start_that_has_all_the_time_that_it_may_take(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = server(start_timeout=3600.0)
    Loop(world, monkeypatch, nothing, lambda: world.kernel.send(b"\x0f"))
    assert world.supervisor.run() == 0
    assert said(world) == ["interrupted before it served, stopping"]


def test_a_start_that_is_interrupted_when_it_is_done_does_not_say_that_it_serves(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    def both() -> None:
        world.process().tells("serving")
        world.kernel.send(b"\x0f")

    world = server({})
    Loop(world, monkeypatch, nothing, both)
    assert world.supervisor.run() == 0
    assert said(world) == ["interrupted before it served, stopping"]


def test_a_server_says_once_that_it_serves_and_goes_on(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = server({})
    serving = lambda: world.process().tells("serving")  # noqa: E731
    Loop(world, monkeypatch, nothing, serving, nothing, nothing, lambda: world.kernel.send(b"\x0f\x0f"))
    assert world.supervisor.run() == 0
    assert said(world) == ["serving", "stopping at once", "stopped"]


def test_time_based_work_is_done_at_the_first_turn_and_then_only_when_it_is_due(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, ticks, flushed = server(), list[float](), list[str]()
    monkeypatch.setattr(supervisor_module, "_TICK", 3600.0)
    monkeypatch.setattr(world.supervisor, "_tick", ticks.append)
    monkeypatch.setattr(world.supervisor._limited, "flush", lambda: flushed.append("what was said too often"))
    Loop(world, monkeypatch, nothing, nothing, lambda: world.kernel.send(b"\x0f"))
    world.supervisor.run()
    assert len(ticks) == len(flushed) == 1


def test_signals_requests_and_messages_of_children_wake_the_loop(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, waking = server({}), list[tuple[Any, int]]()

    def look() -> None:
        poller = world.supervisor._poller
        waking.extend((what, events & zmq.POLLIN) for what, events in poller.sockets)
        expected.append(world.child().fileno())
        world.kernel.send(b"\x0f")

    Loop(world, monkeypatch, nothing, look)
    expected: list[Any] = [world.supervisor._control_socket.socket, world._signals]
    world.supervisor.run()
    assert waking == [(what, zmq.POLLIN) for what in expected]
