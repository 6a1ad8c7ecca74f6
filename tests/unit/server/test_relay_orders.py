"""The relay's process between its supervisor and its relay: what it opens, reports, obeys and looks after."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from tests.unit.server.test_relay_process import orders

from jurybox.processes import ControlPipe
from jurybox.protocol.errors import ServerGone
from jurybox.protocol.wire import PREFIX
from jurybox.server.relay import process
from jurybox.server.relay.process import FAILED, STOPPED, serve
from jurybox.server.relay.zmq_listener import ZmqListener
from jurybox.server.relay.zmtp_listener import ZmtpListener
from jurybox.server.security.access import make_pair
from jurybox.server.security.limits import most_held


class Played:
    """A supervisor with its control pipe and socket, and a relay that does nothing but count.

    Attributes:
        fails: raised at the next look after the engines.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.theirs, self.pipe = ControlPipe(ours.detach()), ControlPipe(theirs.detach())
        self.linked: list[Any] = []
        self.logged: list[Any] = []
        self.given: list[Any] = []
        self.looks = self.ends = 0
        self.fails: Exception | None = None
        self.context: zmq.Context[Any] = zmq.Context()
        self.control = self.context.socket(zmq.ROUTER)
        self.control.setsockopt(zmq.RCVTIMEO, 20_000)
        self.address = f"tcp://127.0.0.1:{self.control.bind_to_random_port('tcp://127.0.0.1')}"

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.theirs.close()
        self.pipe.close()

    def link(self, *given: Any) -> str:
        self.linked.append(given)
        return "the link"

    def relay(self, front: Any, back: Any, link: Any, report: Any, share: float) -> Any:
        self.given.append((front, back, link, report, share))
        return self

    def look_after(self) -> None:
        self.looks += 1
        if self.fails is not None:
            raise self.fails

    def reclaim(self) -> None:
        pass

    def drain(self, drained: Any) -> None:
        drained()

    def end(self) -> None:
        self.ends += 1

    def warning(self, event: str, **fields: Any) -> None:
        self.logged.append((event, fields))

    def debug(self, event: str, **fields: Any) -> None:
        pass

    async def hears(self, kind: str) -> dict[str, Any]:
        """Return the process's next message of a kind; it tells every second that it is alive."""
        for _ in range(20):
            message = await asyncio.to_thread(self.theirs.receive, 20.0)
            assert message is not None, f"no {kind!r} came"
            if message["kind"] == kind:
                return message
        raise AssertionError(f"no {kind!r} came in twenty messages")

    def serving(self, **more: Any) -> asyncio.Task[int]:
        given = {**orders(), "address": self.address, **more}
        running = asyncio.ensure_future(serve(self.pipe, given, self))  # type: ignore[arg-type]
        running.add_done_callback(self.ended)
        return running

    def ended(self, running: asyncio.Task[int]) -> None:
        """Let nobody wait for a message of a process that has ended."""
        running.get_loop().remove_reader(self.pipe.fileno())
        self.pipe.close()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    made = Played()
    monkeypatch.setattr(process, "LocalLink", made.link)
    monkeypatch.setattr(process, "Relay", made.relay)
    monkeypatch.setattr(process, "_limit_memory", lambda more: None)
    monkeypatch.setattr(process, "_LOOK_AFTER", 0.001)
    yield made
    made.close()


async def test_a_relay_tells_its_address_and_what_it_holds_and_ends_whole_when_it_is_told_to(played: Played) -> None:
    running = played.serving(sessions_share=0.25)
    ready = await played.hears("ready")
    assert (await played.hears("alive"))["relay"]["connections"] == 0
    ((front, back, link, report, share),) = played.given
    assert (link, report, share) == ("the link", played.warning, 0.25)
    assert played.linked == [(played.address, "shm", 10.0)]
    assert ready["tcp"] == front.bound
    host, port = front.bound.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20):
        pass
    back.send_multipart((PREFIX, b"a call"), zmq.NOBLOCK)
    assert played.control.recv_multipart()[1:] == [PREFIX, b"a call"]
    played.theirs.send("stop")
    assert await asyncio.wait_for(running, 60) == STOPPED
    assert (played.ends, back.closed, back.context.closed, played.logged) == (1, True, True, [])
    assert front._listener.fileno() == -1


async def test_a_supervisors_reply_has_a_limit_of_its_own_and_nothing_unsent_delays_the_end(played: Played) -> None:
    running = played.serving(max_message=1 << 20)
    await played.hears("ready")
    back = played.given[0][1]
    assert back.getsockopt(zmq.MAXMSGSIZE) == 64 << 20, "a status document may be larger than a client's message"
    assert back.getsockopt(zmq.LINGER) == 0
    played.theirs.send("stop")
    assert await asyncio.wait_for(running, 60) == STOPPED


async def test_the_order_to_drain_is_answered_and_an_unknown_one_is_logged(played: Played) -> None:
    running = played.serving()
    played.theirs.send("sing")
    played.theirs.send("drain")
    assert await played.hears("drained") == {"kind": "drained"}
    assert played.logged == [("unknown order", {"order": "sing"})]
    assert not running.done(), "it answers until it is told to stop"
    played.theirs.send("stop")
    assert await asyncio.wait_for(running, 60) == STOPPED


async def test_a_relay_that_finds_no_server_leaves_no_socket_open(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Context(zmq.Context[Any]):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    def none(*_: Any) -> None:
        raise ServerGone("there is none")

    monkeypatch.setattr(process.zmq, "Context", Context)
    monkeypatch.setattr(process, "LocalLink", none)
    with pytest.raises(ServerGone, match="there is none"):
        await asyncio.wait_for(played.serving(), 60)
    (context,) = made
    assert context.closed and not played.given


@pytest.mark.parametrize("closes", [False, True])
async def test_a_relay_whose_server_is_gone_stops(played: Played, closes: bool) -> None:
    running = played.serving()
    await played.hears("alive")
    if closes:
        played.theirs.close()
    else:
        played.fails = ServerGone("it is gone")
    assert await asyncio.wait_for(running, 60) == STOPPED
    assert played.ends == 1


async def test_a_relay_whose_memory_is_used_up_says_so_and_fails(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: Any) -> bool:
        return False

    monkeypatch.setattr(process, "_until", full)
    monkeypatch.setattr(process, "_limit_memory", lambda more: 7 << 20)
    assert await asyncio.wait_for(played.serving(), 60) == FAILED
    assert played.logged == [("no memory left, it is restarted", {"limit_mib": 0})], "nothing limits it without keys"
    assert played.ends == 1


@pytest.mark.parametrize("keys", [False, True])
async def test_memory_is_limited_only_where_libzmq_takes_it(
    played: Played, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, keys: bool
) -> None:
    limited: list[int] = []
    monkeypatch.setattr(process, "_limit_memory", lambda more: limited.append(more) or 5 << 30)
    watched: list[Any] = []

    async def until(stop: asyncio.Event, relay: Any, front: Any, most: int | None) -> bool:
        watched.append((relay, type(front), most))
        return False

    monkeypatch.setattr(process, "_until", until)
    key = str(make_pair(tmp_path / "server")[1]) if keys else None
    assert await asyncio.wait_for(played.serving(curve_key=key, max_message=3 << 20), 60) == FAILED
    assert limited == ([most_held(3 << 20) + (64 << 20)] if keys else [])
    assert watched == [(played, ZmqListener, 5 << 30) if keys else (played, ZmtpListener, None)]
    assert played.logged == [("no memory left, it is restarted", {"limit_mib": 5 << 10 if keys else 0})]


class Looks:
    """A loop's clock, a relay and a listener, until there were as many looks as a test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float, most: int) -> None:
        self.now, self.seconds, self.most = 100.0, seconds, most
        self.done: list[str] = []
        self.held_by_clients: dict[str, Any] = {"answers": {"bytes": 1}}
        self.freed: list[tuple[int, int]] = []
        self.stop = asyncio.Event()
        monkeypatch.setattr(
            process, "FreedMemory", lambda: SimpleNamespace(look=lambda *given: self.freed.append(given))
        )
        monkeypatch.setattr(process.asyncio, "get_running_loop", lambda: SimpleNamespace(time=lambda: self.now))
        monkeypatch.setattr(process.asyncio, "wait_for", self.wait_for)

    async def wait_for(self, waiting: Any, seconds: float) -> None:
        waiting.close()
        self.now += self.seconds
        assert seconds == 0.1
        raise TimeoutError

    def look_after(self) -> None:
        self.done.append("look")
        if self.done.count("look") == self.most:
            self.stop.set()

    def reclaim(self) -> None:
        self.done.append("reclaim")

    def held(self) -> dict[str, Any]:
        return self.held_by_clients

    async def run(self) -> bool:
        return await process._until(self.stop, self, self, None)  # type: ignore[arg-type]


async def test_engines_are_looked_after_ten_times_as_often_as_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch, 0.25, 9)
    assert await looks.run() is True
    assert looks.done == [*["look"] * 4, "reclaim", *["look"] * 4, "reclaim", "look"]


@pytest.mark.parametrize(
    ("held", "seen"),
    [
        ({"answers": {"bytes": 5}}, (5, 0)),
        ({"answers": {"bytes": 5}, "received": {"bytes": 7}, "connections": 3}, (12, 3)),
    ],
)
async def test_freed_memory_is_returned_by_what_requests_answers_and_connections_hold(
    monkeypatch: pytest.MonkeyPatch, held: dict[str, Any], seen: tuple[int, int]
) -> None:
    looks = Looks(monkeypatch, 1.0, 2)
    looks.held_by_clients = held
    assert await looks.run() is True
    assert looks.freed == [seen, seen]
