"""An engine on a GPU shows what it holds of its memory."""

import numpy as np
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


def test_an_engine_with_a_budget_halves_what_does_not_fit(tmp_path):
    model = {
        "factory": "benchmarks.gpu.models:hungry", "args": {"enough": 0.0}, "max_batch": 8, "min_batch": 8,
        "max_wait_us": 200_000, "lane_rows": 1, "cuda_graphs": False,
    }  # fmt: skip
    budget = {"devices": ["cuda:0"], "device_memory_mib": 1024}
    with serving(tmp_path, {"hungry": model}, **budget) as server, server.connect() as client:
        handles = [client.model("hungry", rows=1) for _ in range(8)]
        rows = [np.array([[200 * 2**20, i, 0, 1]], np.float32) for i in range(8)]
        tickets = [handle.submit(row) for handle, row in zip(handles, rows, strict=True)]
        answers = [float(np.asarray(ticket.result(timeout=30.0).outputs)[0]) for ticket in tickets]
        assert answers == [i + 1.0 for i in range(8)]
        assert "out of memory, batches halved" in server.text()
        assert client.status()["memory"]["device_bytes"] <= 1024 * 2**20
