"""The relay's process: which socket it listens on, how much memory it may take, and how it ends."""

from __future__ import annotations

import asyncio
import mmap
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from jurybox.server.relay import process
from jurybox.server.relay.process import COULD_NOT_START, STOPPED, _front, _limit_memory, run, serve
from jurybox.server.relay.zmq_listener import ZmqListener
from jurybox.server.relay.zmtp_listener import ZmtpListener
from jurybox.server.security.access import make_pair


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


def orders(tcp: str = "127.0.0.1:0", key: Path | None = None) -> dict[str, Any]:
    given = {"tcp": tcp, "curve_key": key and str(key), "curve_clients": None, "max_message": 1 << 20}
    return {**given, "address": "ipc:///nowhere", "sessions_share": 1.0, "log_level": "info", "log_format": "text"}


@pytest.mark.parametrize(("tcp", "keys", "kind"), [
    ("127.0.0.1:0", False, ZmtpListener), ("127.0.0.1:0", True, ZmqListener), ("lo:0", False, ZmqListener),
])  # fmt: skip
def test_only_keys_and_names_of_interfaces_need_libzmq(
    context: zmq.Context[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tcp: str, keys: bool, kind: type
) -> None:
    def resolve(host: str, *_: Any, **__: Any) -> Any:
        if host == "lo":
            raise socket.gaierror("no host has this name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    front = _front(context, orders(tcp, make_pair(tmp_path / "server")[1] if keys else None))
    try:
        assert type(front) is kind and front.bound.startswith("127.0.0.1:")
    finally:
        front.close()


@pytest.mark.parametrize("status", ["VmPeak:\t 9 kB\nVmData:\t  100 kB\nVmStk:\t 9 kB\n", "none", "VmData:\n"])
def test_memory_is_limited_to_so_many_bytes_more_than_there_are(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    limits: list[Any] = []
    stacks: list[int] = []
    monkeypatch.setattr(process, "Path", lambda _: SimpleNamespace(read_text=lambda: status))
    monkeypatch.setattr(process.resource, "getrlimit", lambda which: (5, 1 << 40))
    monkeypatch.setattr(process.resource, "setrlimit", lambda which, limit: limits.append(limit))
    monkeypatch.setattr(process.threading, "stack_size", stacks.append)
    most = _limit_memory(1000)
    assert stacks == ([256 << 10] if "100" in status else []), "each thread's stack counts"
    assert limits == ([(100 * 1024 + 1000, 1 << 40)] if "100" in status else [])
    assert most == (100 * 1024 + 1000 if "100" in status else None)


@pytest.mark.parametrize(
    ("taken", "ends"),
    [
        ((90, 90, 90), 3),  # MiB, of 100: 16 must be left
        ((90, 90, 84, 90, 90, 85), 6),
        ((84,) * 6, None),
        ((90, 90), None),
    ],
)
def test_a_relay_without_memory_for_a_thread_ends_if_that_lasts(
    monkeypatch: pytest.MonkeyPatch, taken: tuple[int, ...], ends: int | None
) -> None:
    """What a flood has made it take stays its allocator's: nothing that needs a thread would ever work again."""
    looks: list[int] = []
    left = list(taken)
    monkeypatch.setattr(process, "_taken", lambda: left.pop(0) << 20)
    monkeypatch.setattr(process, "_RECLAIM", 0.0)
    monkeypatch.setattr(process, "_LOOK_AFTER", 0.001)

    async def until(most: int | None) -> bool:
        stop = asyncio.Event()

        def reclaim() -> None:
            looks.append(1)
            if ends is None and len(looks) == len(taken):
                stop.set()

        relay: Any = SimpleNamespace(look_after=lambda: None, reclaim=reclaim)
        front: Any = SimpleNamespace(held=lambda: {"answers": {"bytes": 0}})
        return await asyncio.wait_for(process._until(stop, relay, front, most), 60)

    assert asyncio.run(until(100 << 20)) is (ends is None)
    assert len(looks) == (ends or len(taken))
    left[:], looks[:] = [], []
    ends, taken = None, (1,)
    assert asyncio.run(until(None)) is True, "without a limit"


def test_what_the_kernel_counts_is_what_it_limits() -> None:
    taken = process._taken()
    assert taken is not None and taken > 1 << 20
    with mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):  # not touched
        more = process._taken()
    assert more is not None and more - taken > 1 << 29, "others may have freed some"


@pytest.mark.parametrize("tcp", ["192.0.2.1:1", "127.0.0.1:port"])
def test_a_relay_that_cannot_listen_says_so(tcp: str) -> None:
    sent: list[Any] = []
    pipe: Any = SimpleNamespace(send=lambda kind, **fields: sent.append((kind, fields)))
    assert asyncio.run(serve(pipe, orders(tcp), SimpleNamespace())) == COULD_NOT_START  # type: ignore[arg-type]
    ((kind, fields),) = sent
    assert kind == "failed" and fields["reason"].startswith(f"cannot listen on tcp://{tcp}: ")
    assert fields["reason"].endswith("; see server.tcp")


def test_a_relay_whose_supervisor_has_ended_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "configuration", lambda _: None)
    assert run(SimpleNamespace()) == STOPPED  # type: ignore[arg-type]

    async def broken(*_: Any) -> int:
        raise BrokenPipeError

    written: list[Any] = []
    monkeypatch.setattr(process, "configuration", lambda _: orders())
    monkeypatch.setattr(process, "configure", lambda *arguments: arguments)
    monkeypatch.setattr(process, "keep_freed_memory", written.append)
    monkeypatch.setattr(
        process, "Path", lambda name: SimpleNamespace(write_text=lambda text: written.append((name, text)))
    )
    monkeypatch.setattr(process, "serve", broken)
    assert run(SimpleNamespace()) == STOPPED  # type: ignore[arg-type]
    assert written == [8 << 20, ("/proc/self/oom_score_adj", "500")]
