"""A server under systemd reports that it is ready, that it is alive and that it stops."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

import numpy as np
from tests.serving import serving, wait_until


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


def opens_a_pipe(pid: int) -> bool:
    """Whether a thread waits for the other end of a pipe; true, too, where the kernel does not say what threads do."""
    waits = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            waits.add(task.joinpath("wchan").read_text())
    return waits <= {"0", ""} or "wait_for_partner" in waits


def test_the_service_manager_is_asked_for_more_time_as_long_as_the_last_weights_are_being_saved(tmp_path) -> None:
    models = {"affine": {"factory": "tests.models:affine", "publish": "double_buffer", "save_dir": "kept"}}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        with serving(tmp_path, models, {"NOTIFY_SOCKET": manager.getsockname()}) as server:
            slow_disk = tmp_path / "kept" / "affine" / ".weights-000000000001.safetensors.aside"
            os.mkfifo(slow_disk)  # a file that can be opened only when somebody reads it
            with server.connect() as client, client.publisher("affine") as publisher:
                publisher.publish({"scale": np.array(3, np.float32), "offset": np.array(0, np.float32)})
                # The save that has begun fails, as pipes cannot be synced, and the last one is then made. Begun by the
                # stop, that one would fail.
                wait_until(lambda: opens_a_pipe(server.process.pid), what="a save that waits for the disk")
            server.process.send_signal(signal.SIGTERM)
            while not manager.recv(4096).startswith(b"STOPPING=1"):
                pass
            for _ in range(4):  # draining alone, which is over at once, takes one of them
                assert manager.recv(4096) == b"EXTEND_TIMEOUT_USEC=30000000\nSTATUS=draining"
            assert server.process.poll() is None
            reader = os.open(slow_disk, os.O_RDONLY | os.O_NONBLOCK)
            try:
                assert server.process.wait(30) == 0
            finally:
                os.close(reader)
        assert (tmp_path / "kept" / "affine" / "weights-000000000001.safetensors").is_file()
