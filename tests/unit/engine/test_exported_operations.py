"""Modules whose operations are called directly compute what their forward computes, or are called as they are."""

import random
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.serving import serving, wait_until

from jurybox.protocol import TensorSpec
from jurybox.protocol.segment import segment_name
from jurybox.protocol.weights import WeightsChannel
from jurybox.protocol.weights.publisher import Publisher
from jurybox.server.engine import model_code
from jurybox.server.engine.exported import Direct, NotDirect, export, rows_of, tensors_of
from jurybox.server.engine.model_code import LoadError, ModelOrder, load
from jurybox.server.engine.served import move
from jurybox.server.engine.weights_updater import WeightsUpdater
from jurybox.server.settings.config import ModelSettings

CPU = torch.device("cpu")
IN = {"x": TensorSpec("float32", (4,)), "n": TensorSpec("int64", ())}
ONE = {"x": TensorSpec("float32", (4,))}
MOST = 16


class Many(torch.nn.Module):
    """Parameters, buffers of both kinds, a constant, tied weights, a shape, an index, and a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        self.tied = self.second
        self.table = torch.nn.Embedding(3, 4)
        self.register_buffer("kept", torch.full((4,), 2.0))
        self.register_buffer("unkept", torch.full((4,), 3.0), persistent=False)
        self.constant = torch.arange(4.0)

    def forward(self, x, n):
        y = self.tied(torch.relu(self.first(x))) * self.kept + self.unkept - self.constant + self.table(n)
        return {"y": y, "mean": y.mean(1), "rows": torch.full((x.shape[0],), x.shape[0], dtype=torch.int64)}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for key in one:
        assert one[key].dtype == other[key].dtype
        assert torch.equal(one[key], other[key])


def test_a_module_and_its_operations_compute_the_same_bytes_for_any_number_of_rows():
    module = Many().eval()
    direct = export(module, IN, MOST, CPU)
    with torch.inference_mode():
        for rows in range(1, MOST + 1):
            given = rows_of(rows, IN)
            same(module(**given), direct(**given))
            same(module(**given), direct(*given.values()))


class Outputs(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.kind = kind

    def forward(self, x):
        y = self.layer(x)
        return {"tensor": y, "tuple": (y, y + 1), "list": [y, y + 1], "single": (y,)}[self.kind]


@pytest.mark.parametrize("kind", ["tensor", "tuple", "list", "single"])
def test_outputs_keep_their_form(kind):
    module = Outputs(kind).eval()
    direct = export(module, ONE, MOST, CPU)
    x = torch.randn(3, 4)
    expected, found = module(x), direct(x)
    if kind == "tensor":
        assert torch.equal(expected, found)
    else:
        assert type(found) is tuple and len(found) == len(expected)
        assert all(map(torch.equal, expected, found))


def test_a_module_that_takes_its_inputs_by_position():
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh()).eval()
    direct = export(module, ONE, MOST, CPU)
    x = torch.randn(5, 4)
    assert torch.equal(module(x), direct(x))


def test_the_operations_use_the_tensors_that_the_module_has_now():
    module = Many().eval()
    direct = export(module, IN, MOST, CPU)
    given = rows_of(3, IN)
    before = direct(**given)["y"].clone()
    for tensor in module.state_dict(keep_vars=True).values():  # as the weights updater switches to another copy
        tensor.data = torch.full_like(tensor.data, random.uniform(1, 2))
    assert not torch.equal(before, direct(**given)["y"])
    same(module(**given), direct(**given))
    move(module, CPU)  # as a model that sleeps and wakes
    same(module(**given), direct(**given))


class Samples(torch.nn.Module):
    def forward(self, x):
        return torch.bernoulli(torch.full_like(x, 0.5))


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x + self.calls


class Steps(torch.nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Length(torch.nn.Module):
    def forward(self, x):
        return x * len(x)


class Decides(torch.nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x - 1


class Halves(torch.nn.Module):
    def forward(self, x):
        return torch.cat([x[: len(x) // 2] + 1, x[len(x) // 2 :] - 1]) if len(x) > 2 else x


class Nested(torch.nn.Module):
    def forward(self, x):
        return {"a": (x, x + 1)}


class Sleeper(torch.nn.Module):
    def sleep(self):
        return 0

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Samples(), "draws random numbers"),
        (Counts(), "something else than its forward"),
        (Steps(), "something else than its forward"),
        (Length(), r"specialized it to be a constant \(4\)"),
        (Decides(), "torch.export refuses it"),
        (Halves(), "torch.export refuses it"),
        (Nested(), "expected a tensor, or a tuple or dict"),
        (Sleeper(), "method sleep or wake"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, torch.nn.Module) else "",
)
def test_a_module_that_cannot_be_called_so_is_refused_with_the_reason(module, says):
    with pytest.raises(NotDirect, match=says):
        export(module, ONE, MOST, CPU)


class Attends(torch.nn.Module):
    """Attention, which can drop out by itself."""

    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout

    def forward(self, x):
        rows = x[:, None, :, None]
        return torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, dropout_p=self.dropout).flatten(1)


@pytest.mark.parametrize(
    "layer", [torch.nn.Dropout(0.5), torch.nn.AlphaDropout(0.5), Attends(0.0)], ids=lambda layer: type(layer).__name__
)
def test_dropout_and_attention_in_evaluation_mode_draw_nothing_and_are_called(layer):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), layer).eval()
    direct = export(module, ONE, MOST, CPU)
    x = torch.randn(3, 4)
    assert torch.equal(module(x), direct(x))


@pytest.mark.parametrize("layer", [torch.nn.Dropout(0.5).train(), Attends(0.5)], ids=["dropout", "attention"])
def test_dropout_that_is_in_use_is_refused(layer):
    with pytest.raises(NotDirect, match="draws random numbers"):
        export(layer, ONE, MOST, CPU)


@pytest.mark.parametrize("name", ["a b", "class", "call"])
def test_an_input_may_have_any_name(name):
    module = torch.nn.Linear(4, 2)
    direct = export(module, {name: ONE["x"]}, MOST, CPU)
    x = torch.randn(3, 4)
    assert torch.equal(module(x), direct(x))


class Joins(torch.nn.Module):
    """Lists of results, keyword arguments, results of several parts, and arithmetic with the number of rows."""

    def forward(self, x):
        low, high = torch.split(x, 2, dim=1)
        values, places = torch.max(x, dim=1)
        both = torch.cat([high, low, torch.add(low, high, alpha=0.5)], dim=1)
        return both.reshape(x.shape[0] * 2, 3).sum(0, keepdim=True).expand(x.shape[0], 3), values, places


def test_operations_on_lists_parts_and_numbers_of_rows():
    module = Joins()
    direct = export(module, ONE, MOST, CPU)
    for rows in (1, 2, 7, MOST):
        x = torch.randn(rows, 4)
        assert all(map(torch.equal, module(x), direct(x)))


def test_results_are_released_once_no_operation_needs_them():
    class Deep(torch.nn.Module):
        def forward(self, x):
            for _ in range(20):
                x = torch.neg(x.repeat(1, 1)) + torch.abs(x)
            return x

    direct = export(Deep(), {"x": TensorSpec("float32", (100_000,))}, 4, CPU)
    x = torch.ones(4, 100_000)
    with torch.profiler.profile(profile_memory=True) as profile, torch.inference_mode():
        direct(x)
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    assert x.nbytes <= most <= 4 * x.nbytes


def program(module: torch.nn.Module, least: int, most: int) -> torch.export.ExportedProgram:
    shapes = ({0: torch.export.Dim("batch", min=least, max=most)},)
    return torch.export.export(module, (torch.zeros(max(2, least), 4),), dynamic_shapes=shapes)


@pytest.mark.parametrize(("least", "most"), [(1, MOST - 1), (4, 64)])
def test_a_program_of_other_batches_is_not_called_without_its_checks(least, most):
    module = Outputs("tensor")
    with pytest.raises(NotDirect, match="expected any number from 1 to 16"):
        Direct(module, program(module, least, most), ONE, MOST, tensors_of(module))


def test_a_program_of_rows_of_another_shape_is_not_called_without_its_checks():
    module = Outputs("tensor")
    with pytest.raises(NotDirect, match="rows of shape"):
        Direct(module, program(module, 1, 64), {"x": TensorSpec("float32", (2, 2))}, MOST, tensors_of(module))


def test_a_program_with_a_step_of_two_rows_is_not_called_without_its_checks():
    half = torch.export.Dim("half", min=1, max=64)
    module = Outputs("tensor")
    pairs = torch.export.export(module, (torch.zeros(4, 4),), dynamic_shapes=({0: 2 * half},))
    with pytest.raises(NotDirect, match="expected any number"):
        Direct(module, pairs, ONE, MOST, tensors_of(module))


def test_a_program_whose_inputs_have_batches_of_their_own_is_not_called_without_its_checks():
    class Both(torch.nn.Module):
        def forward(self, x, y):
            return x.sum() + y

    module, sizes = Both(), [{0: torch.export.Dim(name, min=1, max=64)} for name in "xy"]
    apart = torch.export.export(module, (torch.zeros(4, 4), torch.zeros(5, 4)), dynamic_shapes=tuple(sizes))
    for most in (1, MOST):
        with pytest.raises(NotDirect, match="expected any number"):
            Direct(module, apart, {**ONE, "y": ONE["x"]}, most, tensors_of(module))


def order(**settings):
    return ModelOrder.of(ModelSettings(**settings).model_dump(mode="json"))


def test_a_file_of_torch_export_is_called_directly_where_that_is_possible(tmp_path):
    module = Many().eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    for name, export_, direct in (("plain", module, True), ("counts", Counts(), False)):
        kwargs = rows_of(2, IN) if direct else {"x": torch.zeros(2, 4)}
        shapes = {key: {0: batch} for key in kwargs}
        torch.export.save(
            torch.export.export(export_, (), kwargs, dynamic_shapes=shapes), path := tmp_path / f"{name}.pt2"
        )
        loaded = load(name, order(exported=str(path), max_batch=MOST), CPU).model
        assert isinstance(loaded.module, Direct) is direct
        assert list(loaded.inputs) == list(kwargs)
        if direct:
            given = rows_of(5, IN)
            same(module(**given), loaded.module(**given))


@pytest.mark.parametrize("most", [4, MOST], ids=["called directly", "through torch"])
def test_a_files_tensors_have_the_names_of_the_module_that_was_exported(tmp_path, most):
    module, other = (torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2)).eval() for _ in range(2))
    torch.export.save(program(module, 1, 4), path := tmp_path / "model.pt2")
    save_file(other.state_dict(), weights := tmp_path / "weights.safetensors")
    settings = order(exported=str(path), weights=str(weights), publish="double_buffer", max_batch=most)
    loaded = load("m", settings, CPU)
    assert isinstance(loaded.model.module, Direct) is (most == 4)
    assert list(loaded.layout.places) == list(module.state_dict())
    rows = torch.randn(3, 4)
    (name,) = loaded.model.inputs
    assert torch.equal(other(rows), loaded.model.module(**{name: rows}))
    with WeightsChannel.create(segment_name("exptest", "weights"), loaded.layout) as channel:
        with Publisher(channel) as publisher:
            publisher.publish(module)
        served = getattr(loaded.model.module, "_orig_mod", loaded.model.module)
        updater = WeightsUpdater(channel, served, CPU, 0, lambda action: action(), lambda version, age: None)
        try:
            updater.start()
            updater.use(0)
            assert torch.equal(module(rows), loaded.model.module(**{name: rows}))
        finally:
            updater.stop()
            updater.join()


def test_a_factorys_module_that_cannot_be_exported_is_refused_with_the_setting():
    with pytest.raises(LoadError, match=r"models\.m\.export: .*serve it without export"):
        load("m", order(factory="tests.models:moody", export=True), CPU)
    with pytest.raises(LoadError, match="expected rows of fixed shape"):
        load("m", order(factory="tests.open_models:shout", export=True), CPU)


@pytest.mark.parametrize(
    ("more", "says"),
    [({"compile": True}, "compile exports the module, too"), ({"group": "g"}, "export is for models that are served")],
)
def test_settings_that_do_not_go_with_export_are_refused(more, says):
    with pytest.raises(ValueError, match=says):
        ModelSettings(factory="tests.models:affine", export=True, **more)


def test_an_exported_factory_answers_with_the_weights_that_are_published(tmp_path):
    models = {"m": {"factory": "tests.models:affine", "publish": "double_buffer", "export": True, "max_batch": 8}}
    x = np.ones((3, 4), np.float32)
    with serving(tmp_path, models) as server, server.connect() as client:
        model = client.model("m")
        before = model.infer(x)
        client.publisher("m").publish({"scale": torch.tensor(7.0), "offset": torch.tensor(5.0)})
        wait_until(lambda: not np.array_equal(model.infer(x), before), 20, "the published weights")
        np.testing.assert_array_equal(model.infer(x), 7 * x + 5)


class Placed(torch.nn.Module):
    """Names the device on which it is exported: new tensors, conversions, and a constant."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.constant = torch.arange(4.0)

    def forward(self, x):
        places = torch.arange(4, device=x.device)
        return self.layer(x.float()) + self.constant + places + torch.ones(4).to(x.device)


def test_a_program_computes_on_another_device_than_that_on_which_it_was_exported(tmp_path):
    file, meta = tmp_path / "placed.pt2", torch.device("meta")
    batch = torch.export.Dim("batch")
    torch.export.save(torch.export.export(Placed(), (torch.ones(2, 4),), dynamic_shapes=({0: batch},)), file)
    order = ModelOrder.of(ModelSettings(exported=str(file)).model_dump(mode="json"))
    model = model_code._from_exported("placed", order, meta)  # it is also probed there
    assert model.module(x=torch.ones(3, 4, device=meta)).device == meta
    named = [node.kwargs.get("device", meta) for node in model.module.source.graph.nodes]
    assert len(named) > 3 and set(map(str, named)) == {"meta"}
    on_host = model_code._from_exported("placed", order, CPU)
    assert on_host.outputs == model.outputs and on_host.module(x=torch.ones(3, 4)).device == CPU
