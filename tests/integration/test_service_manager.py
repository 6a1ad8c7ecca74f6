"""A server under systemd says when it serves, that it lives, and that it ends."""

from __future__ import annotations

import socket

from tests.serving import serving


def test_the_service_manager_hears_readiness_life_and_the_end(tmp_path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        environ = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "300000"}
        with serving(tmp_path, {"affine": {"factory": "tests.models:affine"}}, environ) as server:
            heard = [manager.recv(4096).decode()]
            while not heard[-1].startswith("READY=1"):
                heard.append(manager.recv(4096).decode())
            assert heard[-1] == "READY=1\nSTATUS=serving affine (ready)"
            # Meanwhile it asked for more time, and for nothing else: the watchdog begins with the readiness.
            assert all(word.startswith("EXTEND_TIMEOUT_USEC=30000000\nSTATUS=loading") for word in heard[:-1])
            assert manager.recv(4096) == b"WATCHDOG=1"
            assert server.stop() == 0
            while (last := manager.recv(4096)) == b"WATCHDOG=1":
                pass
            assert last.startswith(b"STOPPING=1")
