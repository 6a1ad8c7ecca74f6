"""Files and factories that a model's settings name and that cannot be loaded: each is refused with a sentence."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jurybox.protocol import TensorSpec
from jurybox.server.engine import model_code
from jurybox.server.engine.model_code import LoadError, ModelOrder, load
from jurybox.server.models import ServedModel
from jurybox.server.settings.config import ModelSettings

CPU = torch.device("cpu")
ROW = TensorSpec("float32", (4,))


def refusal(**settings: object) -> str:
    with pytest.raises(LoadError) as refused:
        load("m", ModelOrder.of(ModelSettings.model_validate(settings).model_dump(mode="json")), CPU)
    return str(refused.value)


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*_: object) -> None:
        raise error

    return function


def test_a_program_that_is_not_there_or_cannot_be_read_is_refused_with_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt2"
    assert refusal(exported=str(path)).startswith(f"models.m.exported = '{path}': there is no such file; write one")
    path.write_bytes(b"")
    error = PermissionError(13, "Permission denied")
    monkeypatch.setattr(model_code.zipfile, "ZipFile", raising(error))
    assert refusal(exported=str(path)) == f"models.m.exported = '{path}': cannot be read: Permission denied"


@pytest.mark.parametrize("name", ["model/data/weights/code.so", "model/data/constants/custom_obj_0", "model/other.pt"])
def test_a_part_of_a_program_that_might_be_code_is_named_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(torch.export, "load", raising(AssertionError("it was loaded")))
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/models/model.json", "{}")
        archive.writestr(name, b"")
    assert f"'{path}': {name!r} in it is neither tensors nor a graph, and to load it might run code" in refusal(
        exported=str(path)
    )


@pytest.mark.parametrize(
    ("value", "said"), [(2, "2"), (None, "None"), (torch.tensor(2.0), r"tensor\(2.\)")], ids=["int", "none", "no rows"]
)
def test_an_input_of_a_program_that_is_no_tensor_with_rows_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object, said: str
) -> None:
    with zipfile.ZipFile(path := tmp_path / "model.pt2", "w") as archive:
        archive.writestr("model/models/model.json", "{}")
    signature = SimpleNamespace(user_inputs=["x", "n"])
    program = SimpleNamespace(example_inputs=((), {"x": torch.zeros(2, 4), "n": value}), graph_signature=signature)
    monkeypatch.setattr(torch.export, "load", lambda path: program)
    assert re.search(f"input 'n' is {said}, expected tensors whose first", refusal(exported=str(path)))


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], str]:
    """Takes a function for a factory of a user's module; returns its setting."""

    def factory_(function: Callable[..., Any]) -> str:
        module = SimpleNamespace(__name__="users", f=function, __file__="users.py")
        function.__module__ = "users"
        monkeypatch.setattr(model_code, "_imported", lambda name: module)
        return "users:f"

    return factory_


def test_a_factory_that_the_configuration_names_may_be_anybodys(factory: Callable[..., str]) -> None:
    def net() -> ServedModel:
        return ServedModel(torch.nn.Tanh(), {"x": ROW}, {"y": ROW})

    setting = factory(net)
    net.__module__ = "elsewhere"
    order = ModelOrder.of(ModelSettings(factory=setting).model_dump(mode="json"))
    for named in (None, [setting], [setting, "others:f"]):
        assert isinstance(load("m", order, CPU, named).model.module, torch.nn.Tanh)
    for others in ([], ["others:f"]):
        with pytest.raises(LoadError, match=r"'users' does not define 'f' for others, so that users:\* does not allow"):
            load("m", order, CPU, others)


def test_a_factory_is_called_with_the_arguments_of_the_settings(factory: Callable[..., str]) -> None:
    given: list[object] = []

    def net(width: int, *, names: list[str]) -> ServedModel:
        given.append((width, names))
        return ServedModel(torch.nn.Tanh(), {"x": ROW}, {"y": ROW})

    order = ModelSettings(factory=factory(net), args={"width": 3, "names": ["a"]}).model_dump(mode="json")
    load("m", ModelOrder.of(order), CPU)
    assert given == [(3, ["a"])]
    said = refusal(factory=factory(net), args={"widht": 3})
    assert "it takes (width: " in said and "models.m.args is {'widht': 3}" in said


def test_what_a_factory_changed_is_reported_by_its_name(factory: Callable[..., str]) -> None:
    def net() -> ServedModel:
        torch.set_default_dtype(torch.float64)
        return ServedModel(torch.nn.Tanh(), {"x": ROW}, {"y": ROW})

    changed: list[str] = []
    order = ModelOrder.of(ModelSettings(factory=factory(net)).model_dump(mode="json"))
    load("m", order, CPU, changed=changed.extend)
    assert changed == ["torch's default dtype"] and torch.get_default_dtype() == torch.float32


def test_a_file_of_weights_that_is_no_safetensors_file_is_told_from_one_that_fails_otherwise(
    factory: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = factory(lambda: ServedModel(torch.nn.Linear(4, 4), {"x": ROW}, {"y": ROW}))
    path = tmp_path / "w.safetensors"
    where = f"models.m.weights = '{path}': "
    for error, words in (
        (ValueError("odd"), "loading it raised: ValueError: odd"),
        (PermissionError(13, "Permission denied"), "cannot be read: Permission denied"),
        (OSError("odd"), "cannot be read: odd"),
    ):
        monkeypatch.setattr(model_code, "load_file", raising(error))
        assert refusal(factory=setting, weights=str(path)) == where + words
