"""Loading a factory: what it raises is a sentence, and code that changed is imported anew."""

from __future__ import annotations

import os
import sys
import zipfile

import pytest
import torch

from jurybox.server.engine.model_code import LoadError, ModelOrder, load
from jurybox.server.settings.config import ModelSettings

CPU = torch.device("cpu")


def ordered(factory: str) -> ModelOrder:
    return ModelOrder.of(ModelSettings(factory=factory).model_dump(mode="json"))


NETS = """
import torch
from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from {package}layers import SCALE

class Net(torch.nn.Module):
    def forward(self, x):
        return SCALE * x

def net():
    return ServedModel(Net(), {{"x": TensorSpec("float32", (1,))}}, {{"y": TensorSpec("float32", (1,))}})
"""


@pytest.fixture(params=["", "inner."], ids=["modules", "package"])
def code(request, tmp_path, monkeypatch):
    """Writes a user's code, a factory's module and one that it imports; gives (write, load)."""
    unique = f"user_{os.getpid()}_{abs(hash(request.node.name)) % 10**8}"
    package = f"{unique}.{request.param}" if request.param else ""
    folder = tmp_path / package.replace(".", "/")
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "" if package else unique
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(scale, nets=None):
        text = (nets or NETS).format(package=package + prefix)
        (folder / f"{prefix}nets.py").write_text(text)
        (folder / f"{prefix}layers.py").write_text(scale)

    def result():
        return load("user", ordered(f"{package}{prefix}nets:net"), CPU).model.module

    yield write, result
    for name in set(sys.modules) - before:
        if unique in name:
            del sys.modules[name]


def test_changed_code_is_reimported_and_serving_models_keep_the_old(code):
    write, loaded = code
    write("SCALE = 2")
    old = loaded()
    assert loaded().__class__ is old.__class__  # nothing changed: nothing is imported twice
    write("SCALE = 3")  # of the same length, and in the same second
    new = loaded()
    one = torch.ones(1, 1)
    assert (old(one).item(), new(one).item()) == (2, 3)


def test_code_behind_a_symbolic_link_is_imported_anew_too(tmp_path, monkeypatch):
    (tmp_path / "release").mkdir()
    (tmp_path / "current").symlink_to("release")
    monkeypatch.syspath_prepend(str(tmp_path / "current"))
    name = f"linked_{os.getpid()}"
    (tmp_path / "release" / f"{name}nets.py").write_text(NETS.format(package=name))
    try:
        for scale in (2, 3):
            (tmp_path / "release" / f"{name}layers.py").write_text(f"SCALE = {scale}")
            assert load("user", ordered(f"{name}nets:net"), CPU).model.module(torch.ones(1, 1)).item() == scale
    finally:
        for module in ("nets", "layers"):
            sys.modules.pop(f"{name}{module}", None)


def test_code_that_cannot_be_imported_keeps_the_old_modules(code):
    write, loaded = code
    write("SCALE = 2")
    old = loaded()
    write("SCALE = = 3")
    with pytest.raises(LoadError, match="SyntaxError"):
        loaded()
    with pytest.raises(LoadError, match="SyntaxError"):  # and not the old code
        loaded()
    assert old(torch.ones(1, 1)).item() == 2
    write("SCALE = 4")
    assert loaded()(torch.ones(1, 1)).item() == 4


def test_a_module_that_ends_the_process_when_it_is_imported_fails_to_load(code):
    write, loaded = code
    write("SCALE = 2", nets="raise SystemExit(3)")
    with pytest.raises(LoadError, match="SystemExit: 3"):
        loaded()


@pytest.mark.parametrize("factory", ["tests.models:exits", "tests.models:broken"])
def test_a_factory_that_raises_is_named_by_its_setting(factory):
    with pytest.raises(LoadError, match=rf"models.x.factory = '{factory}' raised \w+: "):
        load("x", ordered(factory), CPU)


FAULTS = """
import torch

def called_in_a_wrong_way(side):
    return None

def type_error():
    return torch.zeros(2) @ "text"  # line 8

def runtime_error():
    return torch.zeros(2) @ torch.zeros(3)
"""


@pytest.fixture
def faults(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"faults_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text(FAULTS)
    (tmp_path / f"{name}_import.py").write_text("import sys\nsys.no_such_thing\n")
    yield name
    for module in (name, f"{name}_import"):
        sys.modules.pop(module, None)


def test_an_error_in_a_factory_names_the_line_and_is_not_taken_for_another(faults):
    def refusal(factory):
        with pytest.raises(LoadError) as raised:
            load("x", ordered(factory), CPU)
        return str(raised.value)

    assert refusal(f"{faults}:type_error").endswith(f"({faults}.py:8)")
    assert "raised TypeError" in refusal(f"{faults}:type_error")
    assert "raised RuntimeError" in refusal(f"{faults}:runtime_error")
    assert refusal(f"{faults}:runtime_error").endswith(f"({faults}.py:11)")
    assert "it takes (side), models.x.args is {}" in refusal(f"{faults}:called_in_a_wrong_way")
    broken = refusal(f"{faults}_import:net")  # an AttributeError, but not of the factory's name
    assert "importing" in broken and "no_such_thing" in broken and broken.endswith("_import.py:2)")
    assert f"{faults}.py) has no 'net'" in refusal(f"{faults}:net")


def test_only_what_is_no_program_is_called_so(tmp_path, monkeypatch):
    """Other errors, such as of an operation that nobody registered, keep their own words."""

    def refusal(path):
        order = ModelOrder.of(ModelSettings(exported=str(path)).model_dump(mode="json"))
        with pytest.raises(LoadError) as raised:
            load("x", order, CPU)
        return str(raised.value)

    no_archive, other = tmp_path / "text.pt2", tmp_path / "other.pt2"
    no_archive.write_text("hello")
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("version", "1")
    assert "not a program of torch.export" in refusal(no_archive)
    assert "not a program of torch.export: it has no graph" in refusal(other)

    class Twice(torch.nn.Module):
        def forward(self, x):
            return 2 * x

    good = tmp_path / "good.pt2"
    batch = {"x": {0: torch.export.Dim("batch")}}
    torch.export.save(torch.export.export(Twice(), (torch.ones(2, 3),), dynamic_shapes=batch), good)

    def unregistered(path):
        raise RuntimeError("Could not find operator mine::nms")

    monkeypatch.setattr(torch.export, "load", unregistered)
    assert refusal(good).endswith("torch.export.load raised RuntimeError: Could not find operator mine::nms")


def test_weights_that_cannot_be_read_and_those_of_another_kind_are_told_apart(tmp_path):
    def refusal(path):
        settings = ModelSettings(factory="tests.models:affine", weights=str(path)).model_dump(mode="json")
        with pytest.raises(LoadError) as raised:
            load("x", ModelOrder.of(settings), CPU)
        return str(raised.value)

    (tmp_path / "pickle.pt").write_bytes(b"\x80\x02 not safetensors")
    assert "not a safetensors file" in refusal(tmp_path / "pickle.pt")
    assert "cannot be read: No such file" in refusal(tmp_path / "missing.safetensors")
