"""A GPU shared: models that sleep, engines that pause, rows and weights that stay in device memory."""

import numpy as np
import pytest
import torch
from tests.serving import serving, wait_until

pytestmark = pytest.mark.gpu
HEAVY = {"factory": "benchmarks.gpu.models:heavy", "args": {"megabytes": 256.0}, "publish": "double_buffer", "rows": 64}
ROW = np.zeros((1, 4), np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    models = {
        "heavy": HEAVY,
        "vector": {"factory": "tests.gpu.models:vector", "publish": "double_buffer", "rows": 64},
        "image": {"factory": "tests.gpu.models:image", "max_batch": 8, "rows": 64},
    }
    with serving(tmp_path_factory.mktemp("server"), models, devices=["cuda:0"]) as running:
        yield running


@pytest.fixture
def client(server):
    with server.connect() as connection:
        yield connection


def test_a_sleeping_model_frees_its_device_memory_and_answers_afterwards(client):
    model = client.model("heavy", rows=4)
    with client.publisher("heavy") as publisher:
        state = {f"parts.{i}": torch.full((256 * 2**18 // 16,), 7.0) for i in range(16)}
        version = publisher.publish(state)
        wait_until(lambda: model.infer_reply(ROW).version == version, 30, "the publication")
        free = torch.cuda.mem_get_info(0)[0]
        client.sleep("heavy")
        assert torch.cuda.mem_get_info(0)[0] - free > 600 * 2**20  # the weights, and two copies
        client.wake("heavy")
        reply = model.infer_reply(ROW)
        assert reply.version == version and reply.outputs["low"][0] == reply.outputs["high"][0] == 7.0


def test_graphs_that_were_captured_before_a_sleep_are_captured_anew(client):
    model, rows = client.model("vector", rows=16), np.random.default_rng(0).standard_normal((9, 52)).astype(np.float32)
    before = model.infer(rows)
    client.sleep("vector")
    client.wake("vector")
    after = model.infer(rows)
    for name, expected in before.items():
        np.testing.assert_array_equal(after[name], expected)


def test_engines_that_pause_leave_the_device_alone(client):
    model = client.model("vector", rows=4)
    row = np.zeros((1, 52), np.float32)
    with client.pause(), pytest.raises(TimeoutError):
        model.infer(row, timeout=0.5)
    assert model.infer(row)["value"].shape == (1,)


def test_rows_in_device_memory_get_the_answers_of_rows_in_the_hosts(client):
    model, rng = client.model("image", rows=8), np.random.default_rng(0)
    with client.device_rows("image", 5) as rows:
        images = torch.as_tensor(rows.inputs["image"], device="cuda:0")
        scores = torch.as_tensor(rows.outputs["score"], device="cuda:0")
        for _ in range(20):
            given = rng.integers(0, 256, (5, 384, 384, 3), np.uint8)
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)  # what renders them takes its time: the engine waits for it
                images.copy_(torch.from_numpy(given).pin_memory(), non_blocking=True)
                rows.infer(stream=stream.cuda_stream)
            np.testing.assert_allclose(scores.cpu().numpy(), model.infer(given), atol=5e-3)
        del images, scores


def test_weights_stay_on_the_device_and_are_never_torn(client):
    model = client.model("heavy", rows=4)
    with client.publisher("heavy", device=0) as publisher:
        state = {f"parts.{i}": torch.zeros(256 * 2**18 // 16, device="cuda:0") for i in range(16)}

        def publish():
            for tensor in state.values():
                tensor.fill_(publisher.version + 1)
            return publisher.publish(state)

        first = publish()  # the weights before it may be those of another test, which are not all their version
        wait_until(lambda: model.infer_reply(ROW).version == first, 30, "the first publication")
        for _ in range(20):
            version = publish()
            for _ in range(3):
                reply = model.infer_reply(ROW)
                assert reply.outputs["low"][0] == reply.outputs["high"][0] == reply.version
        wait_until(lambda: model.infer_reply(ROW).version == version, 30, "the last publication")


def test_no_handle_is_taken_that_the_driver_does_not_know(client):
    with pytest.raises(Exception, match="cuIpcOpenMemHandle"):
        client.bound_rows("image", 1, {"image": (bytes(64), 0)}, {"score": (bytes(64), 4096)})
