"""Compiled modules: nothing is compiled while they serve, and weights change within compiled modules."""

import threading
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.models import Affine
from tests.serving import serving, wait_until
from tests.unit.engine.test_device_served import CPU, ROWS, Arena, tickets

from jurybox.protocol import TensorSpec
from jurybox.protocol.segment import segment_name
from jurybox.protocol.weights import WeightsChannel, WeightsLayout
from jurybox.protocol.weights.publisher import Publisher
from jurybox.server.engine import compiled as compiled_module
from jurybox.server.engine.compiled import Compiled
from jurybox.server.engine.device import DeviceServed, Stream
from jurybox.server.engine.model_code import LoadError, ModelOrder, load
from jurybox.server.engine.served import Served
from jurybox.server.engine.weights_updater import WeightsUpdater
from jurybox.server.models import ServedModel
from jurybox.server.settings.config import ModelSettings

OUT = {"action": TensorSpec("float32", (4,))}
IN = {"observation": TensorSpec("float32", (4,))}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, observation):
        return torch.tanh(self.layer(observation))


@pytest.fixture
def counted():
    """A compiled module, and the batch sizes that its backend was given."""
    torch._dynamo.reset()
    seen = []

    def backend(graph, examples):
        seen.extend(len(e) for e in examples if isinstance(e, torch.Tensor) and e.dim() == 2 and e.shape[1] == 4)
        return graph.forward

    return Compiled(Net(), backend), seen


def rungs(served, ladder=(1, 2, 4, 8, 16)):
    served.shapes, served.agreeing = ladder, False
    return served


@pytest.mark.parametrize("kind", [Served, DeviceServed])
def test_warm_up_compiles_the_ladder_and_batches_of_any_size_compile_nothing_more(counted, kind):
    module, _ = counted
    arena = Arena()
    memory = (arena.memory,) if kind is DeviceServed else ()
    model = ServedModel(module, IN, OUT)
    served = rungs(kind("m", model, arena.inputs, arena.outputs, *memory, ROWS, CPU))
    served.warm_up()
    assert module.graphs == 5
    module.seal()
    with torch.inference_mode():
        for rows in (1, 3, 5, 7, 11, 13, 16):
            arena.outputs["action"][:] = -9
            served.run(tickets((0, rows)), rows)
            expected = module._orig_mod(torch.from_numpy(arena.inputs["observation"][:rows]))
            torch.testing.assert_close(torch.from_numpy(arena.outputs["action"][:rows]), expected)
            assert (arena.outputs["action"][rows:] == -9).all()
    assert module.graphs == 5 and module.late == 0
    served.close()


def test_a_shape_outside_the_ladder_is_computed_and_not_compiled(counted):
    module, _ = counted
    with torch.inference_mode():
        module(observation=torch.zeros(2, 4))
        assert module.graphs == 1
        module.seal()
        for rows in (3, 5, 9):
            given = torch.randn(rows, 4)
            torch.testing.assert_close(module(observation=given), module._orig_mod(given))
    assert module.graphs == 1


def test_other_weights_and_other_threads_compile_nothing_anew(counted):
    module, _ = counted
    with torch.inference_mode():
        module(observation=torch.zeros(2, 4))
    module.seal()
    results = []

    def serve():
        with torch.inference_mode():
            for parameter in module._orig_mod.parameters():
                parameter.data = torch.ones_like(parameter)
            results.append(module(observation=torch.ones(2, 4)))

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert module.graphs == 1
    torch.testing.assert_close(results[0], torch.tanh(torch.full((2, 4), 5.0)))


def test_a_publication_keeps_channels_last_so_that_compiled_code_is_still_used():
    torch._dynamo.reset()
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)).to(memory_format=torch.channels_last).eval()
    ran = []

    def backend(graph, examples):
        def call(*args):
            ran.append(graph)
            return graph.forward(*args)

        return call

    module, images = Compiled(net, backend), torch.ones(2, 3, 8, 8)
    with torch.inference_mode():
        module(images)
    module.seal()
    ran.clear()
    twice = {name: 2 * value for name, value in net.state_dict().items()}
    with (
        WeightsChannel.create(segment_name("lasttest", "weights"), WeightsLayout.of(twice)) as channel,
        Publisher(channel) as publisher,
    ):
        publisher.publish(twice)
        updater = WeightsUpdater(channel, net, CPU, 0, lambda action: action(), lambda version, age: None)
        try:
            updater.start()
            updater.use(0)
            with torch.inference_mode():
                module(images)
        finally:
            updater.stop()
            updater.join()
    assert len(ran) == 1
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(net[0].weight.data, twice["0.weight"], rtol=0, atol=0)


def test_without_torchs_stance_retraced_code_is_not_compiled(counted, monkeypatch):
    monkeypatch.delattr(torch.compiler, "set_stance")
    module, _ = counted
    with torch.inference_mode():
        module(observation=torch.zeros(2, 4))
        module.seal()
        given = torch.randn(3, 4)
        torch.testing.assert_close(module(observation=given), module._orig_mod(given))
    assert module.graphs == 1 and module.late == 1


# ---- packages of AOTInductor, replaced by an object with the same methods


class Package:
    """y = scale * x + offset, over constants that are the caller's."""

    names = ("offset", "scale")
    device = "cpu"

    def __init__(self, path):
        self.held = {name: torch.ones(()) for name in self.names}

    def __call__(self, observation):
        return self.held["scale"] * observation + self.held["offset"]

    def get_constant_fqns(self):
        return list(self.names)

    def get_metadata(self):
        return {"AOTI_DEVICE_KEY": self.device}

    def load_constants(self, constants, *, check_full_update, user_managed=False):
        assert check_full_update and set(constants) == set(self.names)
        self.held = dict(constants) if user_managed else {k: v.clone() for k, v in constants.items()}


@pytest.fixture
def package(monkeypatch, tmp_path):
    import torch._inductor

    made = type("Made", (Package,), {})
    monkeypatch.setattr(torch._inductor, "aoti_load_package", made)
    save_file({"scale": torch.tensor(2.0), "offset": torch.tensor(1.0)}, tmp_path / "weights.safetensors")
    (tmp_path / "model.pt2").write_bytes(b"a package")

    def settings(**more):
        specs = {"inputs": {"observation": {"dtype": "float32", "shape": [4]}}}
        outputs = {"action": {"dtype": "float32", "shape": [4]}}
        given = {"exported": str(tmp_path / "model.pt2"), "aot": True, **specs, "outputs": outputs}
        asked = ModelSettings.model_validate({**given, "weights": str(tmp_path / "weights.safetensors"), **more})
        return ModelOrder.of(asked.model_dump(mode="json"))

    return made, settings


def test_weights_are_swapped_in_a_packages_constants_between_batches(package):
    _, settings = package
    loaded = load("ahead", settings(publish="double_buffer"), CPU)
    arena, later = Arena(), []
    served = Served("ahead", loaded.model, arena.inputs, arena.outputs, ROWS)
    served.warm_up()
    channel = WeightsChannel.create(segment_name("ahead", "weights", 1), loaded.layout)
    served.weights_updater = WeightsUpdater(
        channel, loaded.model.module, CPU, 1, later.append, lambda version, age: None
    )
    publisher = Publisher(channel)
    given = arena.inputs["observation"][:3]

    def answers(version=0):
        with torch.inference_mode():
            served.run(tickets((0, 3)), 3, version)
        return arena.outputs["action"][:3].copy()

    try:
        served.weights_updater.start()
        np.testing.assert_array_equal(answers(), 2 * given + 1)
        for version in (1, 2, 3):
            publisher.publish({"scale": torch.tensor(10.0 * version), "offset": torch.tensor(0.0)})
            wait_until(lambda: later, 10, "the publication")
            np.testing.assert_array_equal(answers(), (10.0 * (version - 1)) * given if version > 1 else 2 * given + 1)
            later.pop()()
            np.testing.assert_array_equal(answers(), 10.0 * version * given)
        np.testing.assert_array_equal(answers(2), 20 * given)
        np.testing.assert_array_equal(answers(), 30 * given)
        served._away = True
        served.sleep()
        served.wake()
        np.testing.assert_array_equal(answers(), 30 * given)
    finally:
        served.close()
        served.weights_updater.join()
        channel.close()


@pytest.mark.parametrize("copying", [False, True], ids=["in place", "copied, as before torch 2.8"])
def test_weights_that_are_overwritten_in_a_packages_constants_are_used(package, copying):
    """As on a GPU, where the constants keep their addresses."""
    made, settings = package
    if copying:

        def load_constants(self, constants, *, check_full_update):
            self.held = {name: tensor.clone() for name, tensor in constants.items()}

        made.load_constants = load_constants
    loaded = load("ahead", settings(publish="double_buffer"), CPU)
    arena = Arena()
    served = Served("ahead", loaded.model, arena.inputs, arena.outputs, ROWS)
    channel = WeightsChannel.create(segment_name("ahead", "weights", 2), loaded.layout)
    served.weights_updater = WeightsUpdater(
        channel, loaded.model.module, CPU, 0, lambda action: action(), lambda version, age: None, Stream(CPU)
    )
    publisher = Publisher(channel)
    try:
        publisher.publish({"scale": torch.tensor(10.0), "offset": torch.tensor(0.0)})
        served.weights_updater.start()
        with torch.inference_mode():
            served.run(tickets((0, 3)), 3)
        np.testing.assert_array_equal(arena.outputs["action"][:3], 10 * arena.inputs["observation"][:3])
    finally:
        publisher.close()
        served.close()
        served.weights_updater.join()
        channel.close()


def test_weights_that_were_compiled_into_the_code_are_refused_since_they_would_never_change(package):
    made, settings = package
    made.names = ("scale",)
    with pytest.raises(LoadError, match="offset of its weights were compiled .*always_keep_tensor_constants"):
        load("ahead", settings(publish="double_buffer"), CPU)
    made.names = ("offset", "scale", "more")
    with pytest.raises(LoadError, match="its constants more are not among the weights"):
        load("ahead", settings(), CPU)


def test_a_package_for_another_device_or_torch_is_refused(package, monkeypatch):
    made, settings = package
    made.device = "cuda"
    with pytest.raises(LoadError, match="compiled for cuda, and this engine computes on cpu"):
        load("ahead", settings(), CPU)
    monkeypatch.setattr(torch._inductor, "aoti_load_package", None)
    with pytest.raises(LoadError, match=r"cannot load packages of AOTInductor, expected 2\.6 or newer"):
        load("ahead", settings(), CPU)


@pytest.mark.parametrize(("device", "index"), [(CPU, -1), (torch.device("cuda", 1), 1)])
def test_a_package_is_loaded_to_its_device_and_without_synchronisation_for_threads(package, monkeypatch, device, index):
    made, _ = package
    seen = []

    def load_package(path, run_single_threaded=False, device_index=-1):
        seen.append((run_single_threaded, device_index))
        return made(path)

    made.device = device.type
    monkeypatch.setattr(torch._inductor, "aoti_load_package", load_package)
    compiled_module.CompiledAhead("model.pt2", ["observation"], device)
    assert seen == [(True, index)]


def test_a_package_without_other_weights_keeps_its_compiled_ones(package):
    _, settings = package
    loaded = load("ahead", settings(weights=None), CPU)
    assert loaded.layout is None and len(loaded.digest) == 16
    assert loaded.model.module(observation=torch.ones(1, 4))[0, 0] == 2


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"inputs": None}, "expected inputs and outputs"),
        ({"compile": True}, "expected no compile"),
        ({"weights": None, "publish": "snapshot"}, "expected weights with aot and publish"),
    ],
)
def test_settings_that_a_package_cannot_have_are_refused(package, more, says):
    _, settings = package
    with pytest.raises(ValueError, match=says):
        settings(**more)


def test_the_pages_way_to_compile_is_the_one_that_errors_name():
    from pathlib import Path

    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert "always_keep_tensor_constants" in page and "aoti_compile_and_package" in compiled_module._HOW


# ---- the real compilers


def answers(model, scale):
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    return bool((model.infer(rows) == scale * rows).all())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_compiled_by_inductor_and_one_ahead_are_served(tmp_path):
    """With a C++ compiler: the ladder of two sizes, and a package whose weights a learner publishes."""
    batch = torch.export.Dim("batch", min=1, max=64)
    with torch.no_grad():
        program = torch.export.export(
            Affine(2.0, 1.0), (torch.zeros(2, 4),), dynamic_shapes={"observation": {0: batch}}
        )
        keep = {"always_keep_tensor_constants": True}
        file = str(tmp_path / "affine.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=file, inductor_configs=keep)
        folded = str(tmp_path / "folded.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=folded)
    save_file({"scale": torch.tensor(2.0), "offset": torch.tensor(1.0)}, tmp_path / "affine.safetensors")
    shape = {"observation": {"dtype": "float32", "shape": [4]}}
    ahead = {
        "exported": file, "aot": True, "inputs": shape, "outputs": {"action": shape["observation"]}, "rows": 64,
        "publish": "double_buffer", "weights": str(tmp_path / "affine.safetensors"),
    }  # fmt: skip
    models = {
        "compiled": {"factory": "tests.models:affine", "compile": True, "max_batch": 2, "publish": "double_buffer"},
        "ahead": ahead,
        "folded": {**ahead, "exported": folded},
    }
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    with serving(tmp_path, models, start_timeout=600.0) as server, server.connect() as client:
        states = {model["name"]: model for model in client.status()["models"]}
        assert states["compiled"]["warm_up"]["shapes"] == [1, 2] and states["compiled"]["warm_up"]["graphs"] == 2
        assert states["compiled"]["warm_up"]["seconds"] > 0
        assert "compiled into its code" in states["folded"]["reason"]
        for name in ("compiled", "ahead"):
            model = client.model(name, rows=8)
            for n in (1, 2):
                np.testing.assert_allclose(model.infer(rows[:n]), 2 * rows[:n] + 1)
            with client.publisher(name) as publisher:
                for scale in (3.0, 4.0, 5.0):
                    publisher.publish({"scale": torch.tensor(scale), "offset": torch.tensor(0.0)})
                    wait_until(partial(answers, model, scale), 20, "the publication")
            client.sleep(name)
            client.wake(name)
            np.testing.assert_allclose(model.infer(rows), 5.0 * rows)
