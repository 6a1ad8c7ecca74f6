"""An engine on a GPU: page-locked arena, overlapping batches, CUDA graphs, weights adopted under them."""

import threading

import numpy as np
import pytest
import torch
from tests.gpu.models import image, vector
from tests.serving import serving, wait_until

pytestmark = pytest.mark.gpu
MODELS = {
    "vector": {"factory": "tests.gpu.models:vector", "max_batch": 64},
    "eager": {"factory": "tests.gpu.models:vector", "max_batch": 64, "cuda_graphs": False},
    "image": {"factory": "tests.gpu.models:image", "max_batch": 16, "rows": 256},
    "half": {"factory": "tests.gpu.models:image", "dtype": "bfloat16", "channels_last": True, "max_batch": 16},
    "policy": {"factory": "tests.models:affine", "publish": "double_buffer", "keep_versions": 2},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), MODELS, devices=["cuda:0"]) as running:
        yield running


@pytest.fixture
def client(server):
    with server.connect() as connection:
        yield connection


def expected(served, inputs):
    (name,) = served.inputs
    with torch.inference_mode():
        outputs = served.module.eval()(**{name: torch.from_numpy(inputs)})
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    return dict(zip(served.outputs, (output.numpy() for output in outputs), strict=True))


def check(got, wanted, tolerance):
    got = got if isinstance(got, dict) else {next(iter(wanted)): got}
    for name, values in wanted.items():
        np.testing.assert_allclose(got[name], values, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 17, 64, 200])
@pytest.mark.parametrize("name", ["vector", "eager"])
def test_every_batch_size_answers_as_the_cpu_does(client, name, rows):
    x = np.random.default_rng(rows).standard_normal((rows, 52), np.float32)
    check(client.model(name).infer(x), expected(vector(), x), 1e-3)


@pytest.mark.parametrize(("name", "tolerance"), [("image", 1e-3), ("half", 3e-2)])
def test_images_go_from_the_arena_to_the_device(client, name, tolerance):
    x = np.random.default_rng(0).integers(0, 256, (5, 384, 384, 3), np.uint8)
    check(client.model(name, rows=8).infer(x), expected(image(), x), tolerance)


def test_a_crowd_gets_its_own_answers_while_batches_overlap(server):
    wrong, reference = [], vector()

    def ask(seed):
        with server.connect() as mine:
            model, rng = mine.model("vector", rows=8), np.random.default_rng(seed)
            for _ in range(200):
                x = rng.standard_normal((4, 52), np.float32)
                got, wanted = model.infer(x), expected(reference, x)
                if not all(np.allclose(got[key], wanted[key], atol=1e-3) for key in wanted):
                    wrong.append(seed)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong


def test_weights_change_between_two_batches_of_captured_graphs(client):
    model, publisher = client.model("policy"), client.publisher("policy")
    x = np.ones((3, 4), np.float32)
    for _ in range(50):
        version = publisher.version + 1
        publisher.publish({"scale": np.array(version, np.float32), "offset": np.array(1000 * version, np.float32)})
        wait_until(lambda version=version: model.infer_reply(x).version == version, 10, "adoption")
        reply = model.infer_reply(x)
        np.testing.assert_array_equal(reply.outputs, version * x + 1000 * version)
    earlier = model.infer_reply(x, version=version - 1)
    np.testing.assert_array_equal(earlier.outputs, (version - 1) * x + 1000 * (version - 1))


def test_no_answer_mixes_two_versions_however_fast_the_learner(server, client):
    publisher, stop, wrong = client.publisher("policy"), threading.Event(), []
    x = np.ones((16, 4), np.float32)

    def ask():
        with server.connect() as mine:
            model = mine.model("policy", rows=16)
            while not stop.is_set():
                reply = model.infer_reply(x)
                v = reply.version
                if not (reply.outputs == v * x + 1000 * v).all():
                    wrong.append(v)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2000):
            v = publisher.version + 1
            publisher.publish({"scale": np.array(v, np.float32), "offset": np.array(1000 * v, np.float32)})
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not wrong
