"""The service manager gets the important messages, even if its socket is full of others."""

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
    """Send as many datagrams as it can hold unread; return their number."""
    n = 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.setblocking(False)
        while True:
            try:
                other.sendto(b"from another service", manager.getsockname())
            except BlockingIOError:
                return n
            n += 1


def test_readiness_arrives_although_the_socket_was_full(manager):
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


def test_important_messages_arrive_in_order(manager):
    server = speaker(manager, [0.0])
    full = fill(manager)
    server.ready("serving")
    server.stopping()
    for _ in range(full):
        manager.recv(4096)
    server.close()
    assert manager.recv(4096).startswith(b"READY=1")
    assert manager.recv(4096).startswith(b"STOPPING=1")


def test_a_long_start_requests_more_time_once_a_second_and_reports_progress(manager):
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


def test_without_a_service_manager_nothing_is_sent_and_invalid_variables_are_ignored():
    for environ in ({}, {"NOTIFY_SOCKET": "/nonexistent/x", "WATCHDOG_USEC": "soon"}):
        server = ServiceManager(lambda event, **fields: None, environ)
        server.starting("x")
        server.ready("x")
        server.alive()
        server.close()
