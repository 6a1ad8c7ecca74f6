"""What the service manager must hear it hears, however busy it is with other words."""

from __future__ import annotations

import socket
import time

import pytest

from jurybox.server.supervisor.service_manager import ServiceManager


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(20)
        yield listening


def speaker(manager, clock, **environ):
    return ServiceManager(
        lambda event, **fields: None, {"NOTIFY_SOCKET": manager.getsockname(), **environ}, lambda: clock[0]
    )


def fill(manager):
    """As many datagrams as it holds unread; gives their number."""
    n = 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.setblocking(False)
        while True:
            try:
                other.sendto(b"from another service", manager.getsockname())
            except BlockingIOError:
                return n
            n += 1


def test_readiness_is_heard_although_there_was_no_room_when_it_came(manager):
    clock = [0.0]
    server = speaker(manager, clock, WATCHDOG_USEC="300000")
    full = fill(manager)
    server.ready("serving a (ready)")
    server.alive()
    for _ in range(full):
        manager.recv(4096)
    clock[0] = 1.0
    server.alive()
    assert manager.recv(4096) == b"READY=1\nSTATUS=serving a (ready)"
    assert manager.recv(4096) == b"WATCHDOG=1"


def test_words_that_must_be_heard_come_in_their_order(manager):
    server = speaker(manager, [0.0])
    full = fill(manager)
    server.ready("serving")
    server.stopping()
    for _ in range(full):
        manager.recv(4096)
    server.close()
    assert manager.recv(4096).startswith(b"READY=1")
    assert manager.recv(4096).startswith(b"STOPPING=1")


def test_a_long_start_asks_for_more_time_once_a_second_and_says_how_far_it_is(manager):
    clock = [0.0]
    server = speaker(manager, clock, WATCHDOG_USEC="300000")
    for tenth in range(21):
        clock[0] = tenth / 10
        server.starting("loading, waiting for engine-0")
    heard = [manager.recv(4096) for _ in range(3)]
    assert heard == [b"EXTEND_TIMEOUT_USEC=30000000\nSTATUS=loading, waiting for engine-0"] * 3
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(4096)


def test_a_manager_that_never_listens_costs_half_a_second_at_the_end_and_no_more(manager):
    server = ServiceManager(lambda event, **fields: None, {"NOTIFY_SOCKET": manager.getsockname()})
    fill(manager)
    server.stopping()
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began >= 0.5


def test_where_nobody_asked_nothing_is_said_and_nonsense_is_borne():
    for environ in ({}, {"NOTIFY_SOCKET": "/nonexistent/x", "WATCHDOG_USEC": "soon"}):
        server = ServiceManager(lambda event, **fields: None, environ)
        server.starting("x")
        server.ready("x")
        server.alive()
        server.close()
