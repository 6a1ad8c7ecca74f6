"""An engine on a GPU shows what it holds of its memory."""

import pytest
import torch
from tests.serving import serving, wait_until

pytestmark = pytest.mark.gpu


def test_an_engine_shows_the_device_memory_it_holds(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    models = {"affine": {"factory": "tests.models:affine"}}
    with serving(tmp_path, models, devices=["cuda:0"]) as server, server.connect() as client:
        wait_until(lambda: client.status()["memory"]["device_bytes"] > 0, 10, "device memory on the scoreboard")
