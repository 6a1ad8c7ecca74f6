"""What comes of a model's settings: which code may make it, which tensors it has, and what it is called with."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from jurybox.protocol import TensorSpec
from jurybox.server.engine import model_code
from jurybox.server.engine.exported import Direct
from jurybox.server.engine.model_code import Loaded, LoadError, ModelOrder, digest, load, look_in, place_of
from jurybox.server.models import ServedModel
from jurybox.server.settings.config import ModelSettings

CPU = torch.device("cpu")
ROW = TensorSpec("float32", (4,))


def order(**settings: object) -> ModelOrder:
    return ModelOrder.of(ModelSettings.model_validate(settings).model_dump(mode="json"))


class Plus(torch.nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.ones(*shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loaded]:
    """Loads a module as if a factory had returned it."""

    def load_(module: torch.nn.Module, state: dict[str, TensorSpec] | None = None, **settings: object) -> Loaded:
        model = ServedModel(module, {"x": ROW}, {"y": ROW}, state=state or {})
        monkeypatch.setattr(model_code, "_from_factory", lambda *_: model)
        check: Callable[[torch.nn.Module], object] = settings.pop("check", lambda module: None)  # type: ignore[assignment]
        return load("m", order(factory="m:f", **settings), CPU, check=check)

    return load_


# ---- settings


def test_an_order_has_every_field_of_the_tensors_that_the_settings_name() -> None:
    tensors = {
        "finite": {"dtype": "float32", "shape": [4], "finite": True},
        "plain": {"dtype": "int64", "shape": []},
        "picture": {"dtype": "uint8", "shape": [-1, 3], "capacity": 300},
    }
    found = order(exported="a.pt2", inputs=tensors, outputs=tensors)
    expected = {
        "finite": TensorSpec("float32", (4,), finite=True),
        "plain": TensorSpec("int64"),
        "picture": TensorSpec("uint8", (-1, 3), capacity=300),
    }
    assert (found.inputs, found.outputs, found.state) == (expected, expected, {})


# ---- a module on its way to its device


def test_a_module_is_checked_as_the_factory_returned_it(loaded: Callable[..., Loaded], tmp_path: Path) -> None:
    save_file({"bias": torch.full((4,), 7.0)}, tmp_path / "w.safetensors")
    seen: list[tuple[bool, float]] = []
    loaded(
        Plus(4).train(),
        weights=str(tmp_path / "w.safetensors"),
        check=lambda module: seen.append((module.training, module.bias[0].item())),
    )
    assert seen == [(True, 1.0)]


def test_a_module_is_served_in_evaluation_mode(loaded: Callable[..., Loaded]) -> None:
    module = loaded(torch.nn.Sequential(torch.nn.Dropout(0.9), Plus(4)).train()).model.module
    assert module(torch.ones(2, 4)).tolist() == [[2.0] * 4] * 2


def test_the_digest_and_the_published_layout_are_those_before_the_conversion(loaded: Callable[..., Loaded]) -> None:
    found = loaded(Plus(4), dtype="bfloat16", publish="double_buffer")
    assert found.layout is not None and [str(place.dtype) for place in found.layout.places.values()] == ["float32"]
    assert found.digest == digest(Plus(4)) != digest(found.model.module)
    assert found.model.module(torch.ones(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("channels_last", [True, False])
def test_pictures_are_computed_channels_last_only_if_the_settings_say_so(
    loaded: Callable[..., Loaded], channels_last: bool
) -> None:
    module = loaded(torch.nn.Conv2d(3, 8, 3), channels_last=channels_last).model.module
    assert isinstance(module, torch.nn.Conv2d)
    assert module.weight.is_contiguous(memory_format=torch.channels_last) == channels_last


def test_a_digest_depends_on_names_shapes_and_bytes_and_not_on_the_order_of_tensors() -> None:
    def module(**tensors: torch.Tensor) -> torch.nn.Module:
        found = torch.nn.Module()
        for name, tensor in tensors.items():
            found.register_buffer(name, tensor)
        return found

    a, b = torch.zeros(2, 3), torch.ones(4)
    usual = digest(module(a=a, b=b))
    assert len(usual) == 16 and digest(module(b=b, a=a.clone())) == usual
    others = [
        module(a=a, c=b),
        module(a=torch.zeros(3, 2), b=b),
        module(a=a.view(torch.int32), b=b),
        module(a=a, b=torch.tensor([1.0, 1.0, 1.0, 2.0])),
    ]
    assert len({usual, *map(digest, others)}) == 5


def test_a_model_with_state_cannot_be_called_directly(loaded: Callable[..., Loaded]) -> None:
    with pytest.raises(LoadError, match=r"models\.m\.export: it has state or inputs of variable size"):
        loaded(Plus(4), {"h": TensorSpec("float32")}, export=True)


def test_a_module_without_weights_takes_no_publications(loaded: Callable[..., Loaded]) -> None:
    with pytest.raises(LoadError, match=r"models\.m\.publish: .*at least one tensor.*; serve it without publish"):
        loaded(torch.nn.Tanh(), publish="double_buffer")


def test_weights_that_do_not_fit_the_module_are_refused_by_the_setting(
    loaded: Callable[..., Loaded], tmp_path: Path
) -> None:
    save_file({"bias": torch.ones(5)}, file := tmp_path / "w.safetensors")
    with pytest.raises(LoadError, match=rf"(?s)models\.m\.weights = '{file}' does not fit the module: .*size mismatch"):
        loaded(Plus(4), weights=str(file))


# ---- a factory and the code around it

NETS = """
from torch import nn
from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
{imports}

ROW = TensorSpec("float32", (4,))

def net():
    return ServedModel(nn.Tanh(), {{"x": ROW}}, {{"y": ROW}})

_private = net

class Net(nn.Tanh):
    pass

def own():
    return ServedModel(Net(), {{"x": ROW}}, {{"y": ROW}})
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Writes a user's module into a folder where modules are found; returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    unique, before = f"code_{os.getpid()}", set(sys.modules)

    def write_(name: str, text: str = NETS, imports: str = "") -> str:
        path = tmp_path / f"{name.format(unique).replace('.', '/')}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text.format(imports=imports.format(unique)))
        return name.format(unique)

    yield write_
    for name in set(sys.modules) - before:
        if unique in name:
            del sys.modules[name]


def served_class(factory: str) -> type:
    return type(load("m", order(factory=factory), CPU).model.module)


def test_factories_of_a_named_module_are_those_that_it_defines_for_others(write: Callable[..., str]) -> None:
    one = write("{}_one")
    other = write("{}_other", "from {imports} import net, own\n__all__ = ['own']\n", "{}_one")
    named = [f"{other}:named"]
    for factory in (f"{one}:net", f"{other}:own"):
        load("m", order(factory=factory), CPU, named)
    for factory in (f"{one}:_private", f"{other}:net"):
        with pytest.raises(LoadError, match=rf"does not define .* name it in server.factories = \[\"{factory}\"\]"):
            load("m", order(factory=factory), CPU, named)
        load("m", order(factory=factory), CPU, [*named, factory])
        load("m", order(factory=factory), CPU)


def test_only_the_missing_module_of_the_factory_itself_is_looked_for_in_folders(write: Callable[..., str]) -> None:
    importer = write("{}_importer", imports="import nowhere_to_be_found")
    with pytest.raises(LoadError, match="No module named 'nowhere_to_be_found'") as inner:
        load("m", order(factory=f"{importer}:net"), CPU)
    assert f"({importer}.py:5)" in str(inner.value) and "expected it to be installed" not in str(inner.value)
    with pytest.raises(LoadError, match=f"expected it to be installed, or in .*{Path.cwd()}"):
        load("m", order(factory="nowhere_to_be_found:net"), CPU)


def test_a_callable_without_a_signature_takes_other_arguments() -> None:
    with pytest.raises(LoadError, match=r"it takes other arguments, models.m.args is \{\}"):
        load("m", order(factory="builtins:getattr"), CPU)
    with pytest.raises(LoadError, match="returned a dict, expected jurybox.server.models.ServedModel"):
        load("m", order(factory="builtins:dict"), CPU)


def test_modules_are_found_beside_the_configuration_before_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", list(before))
    monkeypatch.setattr(model_code, "_beside_configuration", [])
    look_in("")
    look_in(str(Path.cwd()))
    assert sys.path == before
    look_in(str(tmp_path))
    assert sys.path == [str(tmp_path), *before]
    with pytest.raises(LoadError, match=f"or in {tmp_path} or {Path.cwd()}$"):
        load("m", order(factory="nowhere_to_be_found:net"), CPU)


def test_the_place_of_an_error_is_the_last_line_of_a_file_of_the_users_own() -> None:
    def failing(code: str) -> str:
        with pytest.raises(Exception) as raised:
            exec(code, {"load": load, "order": order})
        return place_of(raised.value)

    assert failing("1 / 0").startswith(f" ({Path(__file__).name}:")
    assert failing("load('m', order(factory='nowhere_to_be_found:net'), None)").startswith(f" ({Path(__file__).name}:")
    assert place_of(ValueError("never raised")) == ""


def test_after_a_failed_import_a_package_has_the_old_modules_as_attributes(write: Callable[..., str]) -> None:
    write("{}.layers", "SCALE = 2")
    nets = write("{}.nets", imports="from {}.layers import SCALE")
    served_class(f"{nets}:own")
    package, layers = sys.modules[nets.partition(".")[0]], sys.modules[nets.replace("nets", "layers")]
    write("{}.layers", "SCALE = 33")
    write("{}.nets", "from {imports}.layers import SCALE\nraise RuntimeError('odd')", "{}")
    for _ in range(2):
        with pytest.raises(LoadError, match="RuntimeError: odd"):
            served_class(f"{nets}:own")
    assert package.layers is layers and sys.modules[layers.__name__] is layers and layers.SCALE == 2


@pytest.mark.parametrize(
    ("helper", "again"),
    [("{}_helper", False), ("{}.helper", True), ("{}.inner.helper", True)],
    ids=["beside the package", "in the package", "deeper in it"],
)
def test_a_package_is_reloaded_if_a_file_in_it_has_changed(write: Callable[..., str], helper: str, again: bool) -> None:
    write("{}.__init__", "")
    write(helper, "A = 1")
    nets = write("{}.nets", imports=f"import {helper}")
    old = served_class(f"{nets}:own")
    assert served_class(f"{nets}:own") is old
    write(helper, "A = 22")
    assert (served_class(f"{nets}:own") is not old) == again


def test_a_changed_file_of_an_installed_package_is_not_loaded_anew(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    (tmp_path / "site-packages").mkdir()
    installed = tmp_path / "site-packages" / f"code_{os.getpid()}_installed.py"
    installed.write_text("A = 1")
    nets = write("{}_nets", imports="import {}_installed")
    old = served_class(f"{nets}:own")
    installed.write_text("A = 22")
    assert served_class(f"{nets}:own") is old


def test_code_whose_file_is_gone_is_served_as_it_was_imported(write: Callable[..., str], tmp_path: Path) -> None:
    write("{}_helper", "A = 1")
    nets = write("{}_nets", imports="import {}_helper")
    old = served_class(f"{nets}:own")
    (tmp_path / f"code_{os.getpid()}_helper.py").unlink()
    assert served_class(f"{nets}:own") is old


def test_a_changed_file_behind_a_link_into_another_folder_belongs_to_that_folder(
    write: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    real, link = tmp_path / "elsewhere" / "real.py", tmp_path / "inside" / f"code_{os.getpid()}_linked.py"
    real.write_text("A = 1")
    link.parent.mkdir()
    link.symlink_to(real)
    sys.path.insert(0, str(link.parent))  # `write` sets it back
    nets = write("inside.{}_nets", imports="import {}_linked").removeprefix("inside.")
    old = served_class(f"{nets}:own")
    real.write_text("A = 22")
    assert served_class(f"{nets}:own") is old


# ---- exported programs


class Pair(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, n + 1


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., str]:
    """Saves a module as an exported program, with these inputs; returns the path."""

    def save_(module: torch.nn.Module, *given: torch.Tensor, **named: torch.Tensor) -> str:
        batch = torch.export.Dim("batch", min=1, max=64)
        shapes = [{0: batch} if value.dim() else {} for value in (*given, *named.values())]
        names = dict(zip(("x", "n"), shapes, strict=False))
        program = torch.export.export(module, given, named, dynamic_shapes=names)
        torch.export.save(program, path := tmp_path / "model.pt2")
        return str(path)

    return save_


X, N = torch.randn(3, 4), torch.arange(3)


@pytest.mark.parametrize("most", [64, 100], ids=["called directly", "through torch"])
def test_a_programs_inputs_are_passed_as_it_was_exported_and_its_outputs_are_counted_from_0(
    save: Callable[..., str], most: int
) -> None:
    for path in (save(Pair(), X, N), save(Pair(), X, n=N), save(Pair(), x=X, n=N)):
        model = load("m", order(exported=path, max_batch=most), CPU).model
        assert isinstance(model.module, Direct) == (most == 64)
        assert model.inputs == {"x": ROW, "n": TensorSpec("int64")}
        assert model.outputs == {"output0": ROW, "output1": TensorSpec("int64")}
        twice, more = model.module(x=X, n=N)
        assert torch.equal(twice, 2 * X) and torch.equal(more, N + 1)


def test_the_settings_name_the_inputs_and_outputs_of_a_program(save: Callable[..., str]) -> None:
    tensors = {"inputs": {"seen": {"dtype": "float32", "shape": [4]}}, "outputs": {"y": {"dtype": "float32"}}}
    model = load("m", order(exported=save(Plus(4), X), **tensors), CPU).model
    assert (model.inputs, model.outputs) == ({"seen": ROW}, {"y": TensorSpec("float32")})
    assert torch.equal(model.module(seen=X), X + 1)


def test_a_program_computes_in_the_dtype_of_the_settings_and_is_called_directly(save: Callable[..., str]) -> None:
    class Layer(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    model = load("m", order(exported=save(Layer(4, 2), X), dtype="bfloat16", max_batch=64), CPU).model
    assert isinstance(model.module, Direct)
    assert model.module(x=X.bfloat16()).dtype == torch.bfloat16


def test_a_program_with_an_input_or_output_without_rows_is_refused_by_its_name(save: Callable[..., str]) -> None:
    with pytest.raises(LoadError, match=r"input 'n' is .*, expected tensors whose first dimension is the batch"):
        load("m", order(exported=save(Pair(), X, torch.tensor(2))), CPU)


def test_a_program_without_examples_needs_inputs_in_the_settings(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(Plus(4), (X,), dynamic_shapes=({0: batch},))
    program.example_inputs = None
    torch.export.save(program, path := tmp_path / "model.pt2")
    with pytest.raises(LoadError, match=r"has no example inputs: set models\.m\.inputs and \.outputs"):
        load("m", order(exported=str(path)), CPU)


@pytest.mark.parametrize("rows", [2, 3])
def test_a_program_of_one_batch_size_is_refused_whichever_that_is(tmp_path: Path, rows: int) -> None:
    torch.export.save(torch.export.export(Plus(4), (torch.zeros(rows, 4),)), path := tmp_path / "model.pt2")
    with pytest.raises(LoadError, match=f"does not run on {5 - rows} rows: .*if its batch is fixed"):
        load("m", order(exported=str(path)), CPU)


@pytest.mark.parametrize("before", ["0", None])
def test_what_the_environment_says_of_pickles_is_as_before_after_a_program_was_loaded(
    save: Callable[..., str], monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    monkeypatch.delenv(name, raising=False) if before is None else monkeypatch.setenv(name, before)
    load("m", order(exported=save(Plus(4), X)), CPU)
    assert os.environ.get(name) == before
