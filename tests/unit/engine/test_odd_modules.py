"""Modules as users bring them: each is served and answers rightly, or is refused with a sentence that says why."""

from __future__ import annotations

import functools
import itertools
import locale
import os
import signal
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.models import affine
from torch import nn

from jurybox.client import Error, ModelFailed
from jurybox.processes.surroundings import kept
from jurybox.protocol import TensorSpec
from jurybox.server.engine import model_code
from jurybox.server.engine.loads import LOADS, Disturbed
from jurybox.server.engine.model_code import LoadError, ModelOrder, digest, load
from jurybox.server.engine.model_loader import ModelLoader
from jurybox.server.engine.modules import bare, keeps, views_of_weights, weights_of
from jurybox.server.groups.groups import CannotGroup, check_groupable
from jurybox.server.inproc import InprocServer
from jurybox.server.models import ServedModel
from jurybox.server.settings.config import ModelSettings

CPU = torch.device("cpu")
ROW = TensorSpec("float32", (4,))
X = np.float32([[0.5, -1.5, 300, 30000]])


class Calls(nn.Module):
    """What a function returns."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Plus(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, features):
        return features + self.bias


def answer(model, given=X, name="m"):
    with InprocServer({name: model}) as server:
        return server.model(name).infer(given)


# ---- dtypes of outputs

DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("target", [dtype for dtype in DTYPES if dtype != "bfloat16"])
@pytest.mark.parametrize("variable", [False, True], ids=["fixed", "variable"])
def test_an_output_is_converted_if_its_values_are_kept_and_refused_otherwise(target, variable):
    spec = TensorSpec(target, (-1,), capacity=4) if variable else TensorSpec(target, (4,))
    for source in DTYPES:
        values = torch.tensor([0, 1, 1, 0]).to(getattr(torch, source))
        model = ServedModel(Calls(lambda x, v=values: [v] if variable else v[None]), {"x": ROW}, {"y": spec})
        if keeps(values.dtype, getattr(torch, target)):
            np.testing.assert_array_equal(answer(model)[0], [0, 1, 1, 0])
        else:
            with pytest.raises(Error, match=rf"is {source}, the spec promises {target}, which does not keep"):
                answer(model)


def test_every_value_of_a_dtype_is_kept_where_that_is_said():
    for source, target in itertools.product(DTYPES, DTYPES):
        one, other = getattr(torch, source), getattr(torch, target)
        if source == "bool":
            values = torch.tensor([False, True])
        elif one.is_floating_point:
            limits = torch.finfo(one)
            values = torch.tensor([limits.max, limits.min, limits.tiny, 1 + limits.eps], dtype=one)
        else:
            limits = torch.iinfo(one)
            values = torch.tensor([limits.min, limits.max, limits.max - 1, 0, 1], dtype=one)
        there_and_back = values.to(other).to(one)
        same = bool((there_and_back == values).all()) and (one.is_floating_point <= other.is_floating_point)
        if keeps(one, other):
            assert same, (source, target)
        elif target != "bool" and not one.is_floating_point and {source, target} != {"int64", "float64"}:
            assert (
                not same
                or not torch.equal(values.to(torch.float64), values.to(other).to(torch.float64))
                or (source in ("int32", "int64"))
            ), (source, target)


def test_a_state_and_its_initial_value_keep_their_values():
    def forward(x, h):
        return x, (h + 1).double()

    class Counts(nn.Module):
        def forward(self, x, h):
            return forward(x, h)

    number = TensorSpec("float32")
    with pytest.raises(ModelFailed, match="state 'h' is float64, the spec promises float32"):
        with InprocServer({"m": ServedModel(Counts(), {"x": ROW}, {"y": ROW}, state={"h": number})}) as server:
            server.model("m", rows=4).sessions(1).infer(X)
    start = {"h": torch.tensor(0.1, dtype=torch.float64)}
    with pytest.raises(ModelFailed, match="initial_state 'h' is torch.float64"):
        answer(ServedModel(Counts(), {"x": ROW}, {"y": ROW}, state={"h": number}, initial_state=start))


@pytest.mark.parametrize(
    ("row", "fine"),
    [([1, 2], True), ([1.0, 2.0], True), ([1.5], False), ([300], False), ([True], True), (["a"], False)],
)
def test_python_numbers_in_rows_of_any_size_are_values_of_the_specs_dtype(row, fine):
    spec = TensorSpec("uint8", (-1,), capacity=4)
    model = ServedModel(Calls(lambda x: [row]), {"x": ROW}, {"y": spec})
    if fine:
        assert answer(model)[0].tolist() == row
    else:
        with pytest.raises(Error, match="which uint8 does not keep"):
            answer(model)


@pytest.mark.parametrize(
    ("dtype", "row", "came"),
    [
        ("float32", [0.1, 0.2], [np.float32(0.1), np.float32(0.2)]),
        ("float64", [0.1], [0.1]),
        ("float32", [np.inf, -np.inf, np.nan], [np.inf, -np.inf, np.nan]),
        ("float32", [1e39], None),
        ("float16", [65504.0], [65504.0]),
        ("float16", [65536.0], None),
        ("float8_e4m3fn", [448.0, np.nan], [448.0, np.nan]),
        ("float8_e4m3fn", [np.inf], None),
        ("int64", [2**53 + 1], [2**53 + 1]),
    ],
)
def test_floating_point_numbers_of_python_are_rounded_to_the_specs_dtype_and_none_is_lost(dtype, row, came):
    """A model that returns lists would otherwise fail for every number that is no binary fraction."""
    model = ServedModel(Calls(lambda x: [row]), {"x": ROW}, {"y": TensorSpec(dtype, (-1,), capacity=4)})
    if came is None:
        with pytest.raises(Error, match=f"which {dtype} does not keep"):
            answer(model)
    else:
        np.testing.assert_array_equal(answer(model)[0].astype(np.float64), np.float64(came))


def test_a_row_of_bytes_is_bytes_and_no_number():
    model = ServedModel(Calls(lambda x: [5]), {"x": ROW}, {"y": TensorSpec("bytes", capacity=8)})
    with pytest.raises(Error, match="a row of bytes came as int, expected bytes or str"):
        answer(model)


# ---- arguments


def hides(function):
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


class Decorated(Plus):
    forward = hides(Plus.forward)


class Wrapped(Plus):
    forward = functools.wraps(Plus.forward)(hides(Plus.forward))


@pytest.mark.parametrize(
    "make",
    [
        Plus,
        Decorated,
        Wrapped,
        lambda: torch.jit.trace(Plus(), torch.zeros(1, 4)),
        lambda: torch.jit.script(Plus()),
        lambda: nn.DataParallel(Plus()),
        lambda: torch.compile(Plus(), backend="eager"),
        lambda: nn.Sequential(Plus()),
        lambda: torch.fx.symbolic_trace(Plus()),
    ],
    ids=["plain", "decorated", "wraps", "traced", "scripted", "parallel", "compiled", "sequential", "fx"],
)
def test_a_module_whose_argument_has_another_name_is_served(make):
    np.testing.assert_array_equal(answer(ServedModel(make(), {"x": ROW}, {"y": ROW})), X + 1)
    np.testing.assert_array_equal(answer(ServedModel(make(), {"features": ROW}, {"y": ROW})), X + 1)


class Two(nn.Module):
    def forward(self, mask, image):
        return image * 10 + mask


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
def test_inputs_that_match_in_part_are_refused_and_never_swapped(wrap):
    inputs = {"image": ROW, "masks": ROW}
    with pytest.raises(ModelFailed, match=r"takes 'image' by name, but not 'masks'.*\(mask, image\).*or none"):
        answer(ServedModel(wrap(Two()), inputs, {"y": ROW}), {"image": X, "masks": X * 0})
    right = answer(ServedModel(wrap(Two()), {"image": ROW, "mask": ROW}, {"y": ROW}), {"image": X, "mask": X * 0})
    np.testing.assert_array_equal(right, 10 * X)


def test_inputs_with_names_that_no_parameter_can_have_go_by_position_unless_that_would_swap_one():
    inputs = {"arm/mask": ROW, "image": ROW}
    right = answer(ServedModel(Two(), inputs, {"y": ROW}), {"arm/mask": X * 0, "image": X})
    np.testing.assert_array_equal(right, 10 * X)
    with pytest.raises(ModelFailed, match=r"takes 'image' by name, but not 'arm/mask'"):
        answer(ServedModel(Two(), {"image": ROW, "arm/mask": ROW}, {"y": ROW}), {"image": X, "arm/mask": X * 0})


def test_inputs_behind_a_wrapper_that_hides_names_are_passed_by_name_and_never_swapped():
    class Hidden(Two):
        forward = hides(Two.forward)

    right = answer(ServedModel(Hidden(), {"image": ROW, "mask": ROW}, {"y": ROW}), {"image": X, "mask": X * 0})
    np.testing.assert_array_equal(right, 10 * X)
    with pytest.raises(ModelFailed, match="unexpected keyword argument 'masks'"):
        answer(ServedModel(Hidden(), {"image": ROW, "masks": ROW}, {"y": ROW}), {"image": X, "masks": X})


# ---- what is loaded


def ordered(**settings):
    return ModelOrder.of(ModelSettings(factory="m:f", **settings).model_dump(mode="json"))


@pytest.fixture
def loaded(monkeypatch):
    def load_(module, **settings):
        model = ServedModel(module, {"x": ROW}, {"y": ROW})
        monkeypatch.setattr(model_code, "_from_factory", lambda *_: model)
        return load("m", ordered(**settings), CPU)

    return load_


class Extra(Plus):
    def get_extra_state(self):
        return {"steps": 3}

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize(
    "make",
    [Plus, Extra, lambda: nn.DataParallel(Plus()), lambda: torch.compile(Plus(), backend="eager")],
    ids=["plain", "extra state", "parallel", "compiled"],
)
def test_published_weights_have_the_modules_own_names(loaded, make, tmp_path):
    from safetensors.torch import save_file

    save_file({"bias": torch.full((4,), 7.0)}, tmp_path / "w.safetensors")
    found = loaded(make(), publish="double_buffer", weights=str(tmp_path / "w.safetensors"))
    assert list(found.layout.places) == ["bias"]
    assert found.digest == digest(found.model.module)
    with torch.inference_mode():
        assert found.model.module(torch.zeros(1, 4)).tolist() == [[7.0] * 4]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.LazyLinear(4), "has no shape yet: call the module once"),
        (lambda: Plus().to("meta"), "is on the meta device"),
        (lambda: lambda x: x, "its module is a function, expected a torch.nn.Module"),
        (lambda: None, "its module is a NoneType"),
    ],
    ids=["lazy", "meta", "function", "none"],
)
def test_a_module_that_cannot_be_served_is_a_sentence(loaded, make, said):
    with pytest.raises(LoadError, match=f"models.m cannot be served: .*{said}"):
        loaded(make())
    with pytest.raises(ModelFailed, match=said):
        answer(ServedModel(make(), {"x": ROW}, {"y": ROW}))


def test_a_quantized_module_is_served_and_its_weights_are_not_published(loaded):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear}, torch.qint8)
        expected = module(torch.from_numpy(X)).numpy()
        np.testing.assert_allclose(answer(ServedModel(module, {"x": ROW}, {"y": ROW})), expected)
        assert loaded(module).digest
        with pytest.raises(LoadError, match=r"models.m.publish: .*serve it without publish"):
            loaded(module, publish="double_buffer")


class Partly(nn.Module):
    """A part of it is compiled."""

    def __init__(self):
        super().__init__()
        self.part = torch.compile(Plus(), backend="eager")

    def forward(self, x):
        return self.part(x)


def test_weights_of_a_compiled_part_have_the_names_of_the_part(loaded, tmp_path):
    from safetensors.torch import save_file

    save_file({"part.bias": torch.full((4,), 7.0)}, tmp_path / "w.safetensors")
    found = loaded(Partly(), publish="double_buffer", weights=str(tmp_path / "w.safetensors"))
    assert list(found.layout.places) == ["part.bias"]
    with torch.inference_mode():
        assert found.model.module(torch.zeros(1, 4)).tolist() == [[7.0] * 4]


# ---- weights that are kept elsewhere


class Views(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.ones(2))
        view = self.weight.detach()
        if how == "attribute":
            self.view = self.weight.data[1:]
        elif how == "list":
            self.kept = {"deep": [(view,)]}
        elif how == "closure":
            self.function = lambda x: x + view
        elif how == "buffer":
            self.register_buffer("flipped", self.table[:1], persistent=False)
        elif how == "partial":
            self.function = functools.partial(torch.add, other=view)
        elif how == "none":
            self.same, self.other, self.shape = [self.weight], torch.ones(4), self.weight.shape


@pytest.mark.parametrize("how", ["attribute", "list", "closure", "buffer", "partial", "none"])
def test_views_of_weights_are_found_wherever_a_module_keeps_them(how):
    module = nn.Sequential(Views(how))
    assert bool(views_of_weights(module)) == (how != "none")
    assert bool(views_of_weights(torch.compile(module, backend="eager"))) == (how != "none")
    if how != "none":
        with pytest.raises(CannotGroup, match="is a view of a weight"):
            check_groupable("m", "g", module, {"x": ROW})


# ---- what a factory or a forward changes for others

CHANGES = {
    "torch's default dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch's default device": lambda: torch.set_default_device("meta"),
    "torch's grad mode": lambda: torch.set_grad_enabled(False),
    "torch's number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch's deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "torch's precision of matrix products": lambda: torch.set_float32_matmul_precision("medium"),
    "NumPy's error state": lambda: np.seterr(all="raise"),
    "which warnings are errors": lambda: warnings.simplefilter("error"),
    "the working directory": lambda: os.chdir("/"),
    "the locale": lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8"),
}


def test_the_precision_of_matrix_products_is_set_back_whichever_way_it_was_changed():
    """Newer versions of torch refuse to read it the one way after it was set the other way."""
    product, matmul = torch.randn(64, 64), torch.backends.cuda.matmul
    before, named = product @ product, []
    with kept(named.append):
        torch.set_float32_matmul_precision("medium")
    if hasattr(matmul, "fp32_precision"):
        with kept(named.append):
            matmul.fp32_precision = "tf32"
    assert torch.get_float32_matmul_precision() == "highest" and not matmul.allow_tf32
    assert torch.equal(product @ product, before)
    assert len(named) == 1 + hasattr(matmul, "fp32_precision")


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
def test_what_a_factory_changes_for_others_is_set_back_and_named(name, raises, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = locale.setlocale(locale.LC_ALL)
    locale.setlocale(locale.LC_ALL, "C")
    named, filters = [], list(warnings.filters)

    def factory():
        CHANGES[name]()
        if raises:
            raise RuntimeError("broken")

    try:
        with pytest.raises(RuntimeError, match="broken") if raises else kept(), LOADS.code(named.extend):
            factory()
        assert named == [name]
        assert torch.get_default_dtype() == torch.float32 and torch.empty(0).device == CPU and torch.is_grad_enabled()
        assert not torch.are_deterministic_algorithms_enabled() and np.geterr()["divide"] == "warn"
        assert [each for each in warnings.filters if each[0] == "error"] == [e for e in filters if e[0] == "error"]
        assert Path.cwd() == tmp_path and locale.setlocale(locale.LC_ALL) == "C"
        named.clear()
        with LOADS.code(named.extend):
            pass
        assert not named, "nothing is named that did not change"
    finally:
        locale.setlocale(locale.LC_ALL, before)


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
def test_a_forward_that_changes_the_default_dtype_does_not_change_other_models_answers(raises):
    class Changes(nn.Module):
        def forward(self, x):
            torch.set_default_dtype(torch.bfloat16)
            if raises:
                raise ValueError("broken")
            return x.float()

    thirds = ServedModel(Calls(lambda x: x / 3), {"x": TensorSpec("int64", (4,))}, {"y": ROW})
    changed = []
    with InprocServer({"odd": ServedModel(Changes(), {"x": ROW}, {"y": ROW}), "thirds": thirds}) as server:
        server.engine.slots[0].served.changed = changed.extend
        if raises:
            with pytest.raises(ModelFailed, match="broken"):
                server.model("odd").infer(X)
        else:
            server.model("odd").infer(X)
        np.testing.assert_array_equal(server.model("thirds").infer(np.ones((1, 4), np.int64)), np.float32(1 / 3))
    assert set(changed) == {"torch's default dtype"}


def test_no_batch_is_computed_in_a_default_dtype_that_a_factory_sets_meanwhile(monkeypatch):
    """As transformers' from_pretrained does: it sets the dtype, builds the model, and sets it back."""
    monkeypatch.setattr("jurybox.server.engine.loads._PATIENCE", 120.0)  # on a busy machine 300 waits are seconds
    thirds = ServedModel(Calls(lambda x: x / 3), {"x": TensorSpec("int64", (4,))}, {"y": ROW})
    stop = threading.Event()
    built = []

    def factory():
        with LOADS.code(lambda names: None):
            while not stop.is_set():
                torch.set_default_dtype(torch.bfloat16)
                time.sleep(0.001)
                built.append(torch.empty(0).dtype)
                torch.set_default_dtype(torch.float32)
                time.sleep(0.001)

    with InprocServer({"m": thirds}) as server:
        model = server.model("m")
        loading = threading.Thread(target=factory)
        loading.start()
        try:
            for number in range(300):
                expected = np.full((2, 4), number, np.float32) / np.float32(3)
                np.testing.assert_array_equal(model.infer(np.full((2, 4), number), timeout=60), expected)
        finally:
            stop.set()
            loading.join()
    assert set(built) == {torch.bfloat16}, "and the factory's own tensors have its dtype"


def test_a_change_that_begins_and_ends_within_a_forward_is_noticed():
    module = Calls(lambda x: x)
    with InprocServer({"m": ServedModel(module, {"x": ROW}, {"y": ROW})}) as server:
        served = server.engine.slots[0].served

        def meanwhile(x):
            LOADS.changes += 2
            return x

        module.function = meanwhile
        with torch.inference_mode(), pytest.raises(Disturbed):
            served.forward({"x": torch.ones(1, 4)})


@pytest.mark.parametrize("changes", [False, True], ids=["leaves", "changes"])
def test_what_a_factory_sets_while_a_forward_ends_is_not_set_back(changes, monkeypatch):
    """A batch ends while a factory builds: the factory's tensors would silently have another dtype."""
    look, built = torch.get_default_dtype, []
    begun, ends, has_set, stop = (threading.Event() for _ in range(4))

    def factory():
        with LOADS.code(lambda names: None):
            begun.set()
            ends.wait(60)
            torch.set_default_dtype(torch.float64)
            has_set.set()
            stop.wait(60)
            built.append(torch.empty(0).dtype)

    def forward(x):
        if changes:
            torch.set_default_dtype(torch.bfloat16)
        return x

    def slow_look():
        ends.set()
        has_set.wait(0.2)  # it comes within this time only if nothing keeps it from it
        return look()

    with InprocServer({"m": ServedModel(Calls(forward), {"x": ROW}, {"y": ROW})}) as server:
        served = server.engine.slots[0].served
        loading = threading.Thread(target=factory)
        loading.start()
        begun.wait(60)
        with torch.inference_mode():
            monkeypatch.setattr("jurybox.server.engine.loads.torch.get_default_dtype", slow_look)
            served.forward({"x": torch.ones(1, 4)})
            monkeypatch.undo()
        has_set.wait(60)
        stop.set()
        loading.join()
    assert built == [torch.float64] and torch.get_default_dtype() == torch.float32


def test_a_process_that_a_factory_forks_while_a_forward_ends_can_set_the_dtype():
    held, let_go = threading.Event(), threading.Event()

    def ends():
        with LOADS._setting:
            held.set()
            let_go.wait(60)

    forward = threading.Thread(target=ends, daemon=True)
    forward.start()
    held.wait(60)
    try:
        with LOADS.code(lambda names: None):
            if (child := os.fork()) == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(20)  # it ends so if it waits for the lock of a thread that it does not have
                torch.set_default_dtype(torch.float64)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        let_go.set()
        forward.join()


def test_a_factory_that_keeps_the_dtype_changed_while_requests_wait_fails_and_they_are_answered(monkeypatch):
    monkeypatch.setattr("jurybox.server.engine.loads._PATIENCE", 0.05)
    caught = []

    def factory():
        try:
            with LOADS.code(lambda names: None):
                torch.set_default_dtype(torch.float64)
                begun.set()
                stop.wait(60)
        except TimeoutError as error:
            caught.append(str(error))

    begun, stop = threading.Event(), threading.Event()
    with InprocServer({"m": affine()}) as server:
        model = server.model("m")
        loading = threading.Thread(target=factory)
        loading.start()
        begun.wait(60)
        np.testing.assert_array_equal(model.infer(X, timeout=60), 2 * X + 1)
        stop.set()
        loading.join()
    assert "default dtype" in caught[0] and torch.get_default_dtype() == torch.float32


# ---- weights of two models in one memory


def sharing(first, second, settings=({}, {})):
    """Load two modules for two models as an engine's loader does."""
    loader = ModelLoader.__new__(ModelLoader)
    loader._built, loader._wanted = [], {0: 1, 1: 1}
    for model, (module, of) in enumerate(zip((first, second), settings, strict=True)):
        loader._refuse_shared(model, f"m{model}", ordered(**of), module)
    return loader


PUBLISHES = {"publish": "double_buffer"}


@pytest.mark.parametrize("settings", [({}, PUBLISHES), (PUBLISHES, {}), ({}, {"dtype": "bfloat16"})])
def test_weights_of_two_models_are_not_one_memory_if_a_setting_changes_them(settings):
    module = Plus()
    view = Plus()
    view.bias = nn.Parameter(module.bias.data[:])
    for second in (module, nn.Sequential(module), view, torch.compile(module, backend="eager")):
        with pytest.raises(LoadError, match=r"weights that model 'm0' already has, .* changes them for both"):
            sharing(module, second, settings)
    sharing(module, Plus(), settings)


def test_weights_that_never_change_may_serve_two_models():
    module = Plus()
    both = nn.Sequential(module)
    loader = sharing(module, both)
    assert [built.name for built in loader._sharing(module)] == ["m0", "m1"]
    assert bare(nn.DataParallel(module)) is module and list(weights_of(nn.DataParallel(module))) == ["bias"]
