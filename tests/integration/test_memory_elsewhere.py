"""Clients that reach a server's socket from another container: with its memory, without it, as another user."""

import os
import time

import numpy as np
import pytest
from tests.serving import serving

from jurybox.protocol.errors import ServerGone, SharedMemoryError
from jurybox.protocol.segment import directory

MODELS = {"affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 64}}


def test_a_client_that_sees_another_folder_is_told_what_to_do(server, monkeypatch, tmp_path):
    monkeypatch.setenv("JURYBOX_SHM_DIR", str(tmp_path))
    with pytest.raises(SharedMemoryError, match=rf"its shared memory .* is not in {tmp_path}.* the same for"):
        server.connect()


def test_a_client_whose_server_came_back_with_another_folder_is_told_too(tmp_path):
    """As with `ipc: shareable`: the socket's folder is the old one, /dev/shm is not."""
    (elsewhere := directory() / "elsewhere").mkdir()
    x = np.ones((1, 4), np.float32)
    try:
        with serving(tmp_path, MODELS) as first:
            client = first.connect()
            model = client.model("affine")
            np.testing.assert_array_equal(model.infer(x), 2 * x + 1)
        with serving(tmp_path, MODELS, env={"JURYBOX_SHM_DIR": str(elsewhere)}):
            until = time.monotonic() + 30
            while True:
                try:
                    model.infer(x, timeout=5)
                except ServerGone:  # what became of the first; the next call looks for another
                    assert time.monotonic() < until
                except SharedMemoryError as error:
                    assert "start this container again too" in str(error)
                    break
        client.close()
    finally:
        assert not list(elsewhere.iterdir())
        elsewhere.rmdir()


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_client_of_another_user_who_may_read_everything_is_served(server, monkeypatch, transport):
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # names have their owner's user in them
    x = np.ones((1, 4), np.float32)
    with server.connect(transport=transport) as client:
        np.testing.assert_array_equal(client.model("affine").infer(x, timeout=10), 2 * x + 1)
