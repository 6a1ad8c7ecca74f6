"""Full shared memory: models keep serving; operations that need more report it and are retried."""

from __future__ import annotations

import os
import signal
import subprocess

import numpy as np
import pytest
from tests.faults.conftest import MODELS
from tests.serving import segments, serving, wait_until

from jurybox.client import ModelFailed

MIB = 1 << 20


@pytest.mark.slow
def test_full_memory_ends_no_process_and_an_engine_is_restarted_later(memory, tmp_path):
    before = segments()
    with serving(tmp_path / "run", MODELS, under=memory.under, factories=["tests.models:*"]) as server:
        with server.connect() as client:
            model = client.model("affine", rows=2)
            x = np.ones((2, 4), np.float32)
            memory.left(20 * MIB)
            np.testing.assert_array_equal(model.infer(x), 2 * x + 1)  # everything it needs was allocated at the start
            with pytest.raises(ModelFailed, match=r"needs 2\d\.\d MiB, 20\.0 MiB are left of the machine's memory"):
                client.load("more", {"factory": "tests.models:affine", "rows": 800_000})
            os.kill(server.pids()["engine-0"], signal.SIGKILL)
            wait_until(lambda: "cannot start a child yet" in server.text(), 20, "the log")
            assert "are left of the machine's memory" in server.text()
            assert server.process.poll() is None
            memory.left(1 << 40)
            np.testing.assert_array_equal(model.infer(x, timeout=60), 2 * x + 1)
        assert server.stop() == 0
    assert segments() <= before


@pytest.mark.slow
def test_a_server_needs_no_room_in_dev_shm(tmp_path, monkeypatch):
    """Docker gives a container 64 MiB there, whatever its memory is."""
    folder = tmp_path / "shm"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder]).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    monkeypatch.setenv("JURYBOX_SHM_DIR", str(folder))
    try:
        with serving(tmp_path / "run", MODELS) as server, server.connect() as client:
            x = np.ones((2, 4), np.float32)
            np.testing.assert_array_equal(client.model("affine").infer(x), 2 * x + 1)
            assert len(list(folder.iterdir())) == 1
        assert list(folder.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_no_inodes_left_is_named_as_such(tmp_path, monkeypatch):
    from jurybox.protocol.errors import SharedMemoryError
    from jurybox.protocol.segment import Segment

    folder = tmp_path / "few"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=4", "none", folder]).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        for number in range(3):
            (folder / str(number)).touch()
        monkeypatch.setenv("JURYBOX_SHM_DIR", str(folder))
        with pytest.raises(SharedMemoryError, match="no inodes left"):
            Segment.create("jurybox-0-x-y-0", 4096)
    finally:
        subprocess.run(["umount", folder], check=True)
