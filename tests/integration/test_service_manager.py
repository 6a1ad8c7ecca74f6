"""A server under systemd reports that it is ready, that it is alive and that it stops."""

from __future__ import annotations

import socket

from tests.serving import serving


def test_the_service_manager_is_notified_of_readiness_life_and_the_end(tmp_path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        environ = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "300000"}
        with serving(tmp_path, {"affine": {"factory": "tests.models:affine"}}, environ) as server:
            messages = [manager.recv(4096).decode()]
            while not messages[-1].startswith("READY=1"):
                messages.append(manager.recv(4096).decode())
            assert messages[-1] == "READY=1\nSTATUS=serving affine (ready)"
            # Before, it only requested more time: the watchdog starts with the readiness.
            assert all(message.startswith("EXTEND_TIMEOUT_USEC=30000000\nSTATUS=loading") for message in messages[:-1])
            assert manager.recv(4096) == b"WATCHDOG=1"
            assert server.stop() == 0
            while (last := manager.recv(4096)) == b"WATCHDOG=1":
                pass
            assert last.startswith(b"STOPPING=1")
