"""What fails on a GPU fails alone: a capture, a kernel; and programs that were exported on a CPU."""

import numpy as np
import pytest
import torch
from tests.gpu.models import Places
from tests.serving import serving

from jurybox.client import ModelFailed

pytestmark = pytest.mark.gpu
ROWS = np.ones((3, 4), np.float32)


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


def test_a_model_that_cannot_be_captured_leaves_the_others_their_graphs_and_random_numbers(tmp_path):
    models = {name: {"factory": f"tests.gpu.models:{name}", "max_batch": 4} for name in ("draws", "waits")}
    models["eager"] = {**models["draws"], "cuda_graphs": False}
    with serving(tmp_path, models, devices=["cuda"], device_memory_mib=4096) as server, server.connect() as client:
        drawn = [client.model(name).infer(ROWS) for name in ("draws", "eager") for _ in range(2)]
        assert len({values.tobytes() for values in drawn}) == 4
        assert all((values >= 1).all() and (values <= 2).all() for values in drawn)
        waits = client.model("waits")
        np.testing.assert_array_equal(waits.infer(ROWS), ROWS)
        client.sleep("waits")
        client.wake("waits")
        np.testing.assert_array_equal(waits.infer(ROWS), ROWS)
        assert server.text().count("no CUDA graphs") == 1  # it is not tried again at the wake


def test_a_failed_assertion_in_a_kernel_ends_the_engine_and_quarantines_its_model(tmp_path):
    models = {
        "table": {"factory": "tests.gpu.models:table", "max_batch": 1},
        "vector": {"factory": "tests.gpu.models:vector", "max_batch": 4},
    }
    x = np.zeros((1, 52), np.float32)
    with serving(tmp_path, models, devices=["cuda:0"], max_restarts=0) as server, server.connect() as client:
        table, vector = client.model("table"), client.model("vector")
        table.infer(np.array([3]))
        before = vector.infer(x)
        with pytest.raises(ModelFailed, match="quarantine"):
            table.infer(np.array([99]), timeout=90)
        after = vector.infer(x, timeout=90)
        np.testing.assert_allclose(after["value"], before["value"], atol=1e-3)
        assert "device lost" in server.text()


def test_a_program_that_was_exported_on_a_cpu_is_served(tmp_path):
    module, file = Places().eval(), tmp_path / "places.pt2"
    batch = torch.export.Dim("batch")
    torch.export.save(torch.export.export(module, (torch.ones(2, 4),), dynamic_shapes=({0: batch},)), file)
    with serving(tmp_path, {"places": {"exported": str(file)}}, devices=["cuda:0"]) as server:
        with server.connect() as client, torch.inference_mode():
            wanted = module(torch.from_numpy(ROWS)).numpy()
            np.testing.assert_allclose(client.model("places").infer(ROWS), wanted, rtol=1e-3, atol=1e-3)
