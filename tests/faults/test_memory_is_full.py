"""Shared memory that fills up while a server runs: what serves goes on, what needs more says so and is tried again."""

from __future__ import annotations

import os
import signal
import subprocess

import numpy as np
import pytest
from tests.faults.conftest import MODELS
from tests.serving import serving, wait_until

from jurybox.client import ModelFailed


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A tmpfs of 48 MiB as shared memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "none", folder]).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    monkeypatch.setenv("JURYBOX_SHM_DIR", str(folder))
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder):
    file = folder / "filler"
    with file.open("wb") as sink:
        room = os.statvfs(folder)
        os.posix_fallocate(sink.fileno(), 0, room.f_bavail * room.f_frsize)
    return file


@pytest.mark.slow
def test_a_full_dev_shm_ends_nobody_and_an_engine_comes_back_when_there_is_room(small, tmp_path):
    with serving(tmp_path / "run", MODELS, factories=["tests.models:*"]) as server:
        with server.connect() as client:
            model = client.model("affine", rows=2)
            x = np.ones((2, 4), np.float32)
            filler = fill(small)
            np.testing.assert_array_equal(model.infer(x), 2 * x + 1)  # everything it needs was allocated at the start
            with pytest.raises(ModelFailed, match="is full"):
                client.load("more", {"factory": "tests.models:affine", "rows": 400_000})
            os.kill(server.pids()["engine-0"], signal.SIGKILL)
            wait_until(lambda: "cannot start a child yet" in server.text(), 20, "the log")
            assert "is full" in server.text()
            assert server.process.poll() is None
            filler.unlink()
            np.testing.assert_array_equal(model.infer(x, timeout=60), 2 * x + 1)
        assert server.stop() == 0
    assert list(small.iterdir()) == []


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
