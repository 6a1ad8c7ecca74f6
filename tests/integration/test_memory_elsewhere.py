"""Clients that reach a server's socket from another container: with or without its memory, or as another user."""

import os
import time

import numpy as np
import pytest
from tests.serving import serving

from jurybox.protocol.errors import ServerGone, SharedMemoryError
from jurybox.protocol.segment import directory

MODELS = {"affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 64}}


def test_the_error_of_a_client_that_sees_another_folder_says_what_to_do(server, monkeypatch, tmp_path):
    monkeypatch.setenv("JURYBOX_SHM_DIR", str(tmp_path))
    with pytest.raises(SharedMemoryError, match=rf"its shared memory .* is not in {tmp_path}.* the same for"):
        server.connect()


def test_so_does_the_error_after_a_server_restarted_with_another_folder(tmp_path):
    """This happens with `ipc: shareable`: the socket's folder is the same, /dev/shm is not."""
    (elsewhere := directory() / "elsewhere").mkdir()
    x = np.ones((1, 4), np.float32)
    try:
        with serving(tmp_path, MODELS) as first:
            client = first.connect()
            model = client.model("affine")
            np.testing.assert_array_equal(model.infer(x), 2 * x + 1)
        with serving(tmp_path, MODELS, env={"JURYBOX_SHM_DIR": str(elsewhere)}):
            deadline = time.monotonic() + 30
            while True:
                try:
                    model.infer(x, timeout=5)
                except ServerGone:  # the first one stopped; the next call looks for another
                    assert time.monotonic() < deadline
                except SharedMemoryError as error:
                    assert "start this container again too" in str(error)
                    break
        client.close()
    finally:
        assert not list(elsewhere.iterdir())
        elsewhere.rmdir()


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_client_of_another_user_with_access_to_everything_is_served(server, monkeypatch, transport):
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # segment names contain their owner's user ID
    x = np.ones((1, 4), np.float32)
    with server.connect(transport=transport) as client:
        np.testing.assert_array_equal(client.model("affine").infer(x, timeout=10), 2 * x + 1)
