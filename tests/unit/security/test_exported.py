"""An exported program is a file of tensors and a graph: none that holds a pickle runs it."""

import io
import os
import pickle
import shutil
import zipfile

import pytest
import torch

from jurybox.server.engine.model_code import LoadError, ModelOrder, load
from jurybox.server.settings.config import ModelSettings

CPU = torch.device("cpu")


class Shift(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.ones(4))
        self.constant = torch.full((4,), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by + self.constant


class Leaves:
    """What creates a file when it is unpickled."""

    def __init__(self, mark) -> None:
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


@pytest.fixture
def program(tmp_path):
    batch = torch.export.Dim("batch")
    exported = torch.export.export(Shift(), (torch.ones(2, 4),), dynamic_shapes=({0: batch},))
    torch.export.save(exported, tmp_path / "good.pt2")
    return tmp_path / "good.pt2"


def with_parts(program, parts):
    """A copy with other contents of some parts, named below the archive's folder."""
    copy = program.with_name("bad.pt2")
    with zipfile.ZipFile(program) as old, zipfile.ZipFile(copy, "w") as new:
        root = old.namelist()[0].partition("/")[0]
        for info in old.infolist():
            if info.filename.partition("/")[2] not in parts:
                new.writestr(info, old.read(info))
        for name, content in parts.items():
            new.writestr(f"{root}/{name}", content)
    return copy


def pickled(mark):
    buffer = io.BytesIO()
    torch.save((Leaves(mark),), buffer)
    return buffer.getvalue()


def config_of(program, name):
    with zipfile.ZipFile(program) as archive:
        return next(archive.read(part) for part in archive.namelist() if part.endswith(name)).decode()


def asked(file):
    return ModelOrder.of(ModelSettings(exported=str(file)).model_dump(mode="json"))


def test_a_program_of_tensors_is_served(program):
    module = load("good", asked(program), CPU).model.module
    torch.testing.assert_close(module(x=torch.zeros(3, 4)), torch.full((3, 4), 3.0))


def test_pickled_examples_do_not_run(program, tmp_path):
    mark = tmp_path / "mark"
    bad = with_parts(program, {"data/sample_inputs/model.pt": pickled(mark)})
    with pytest.raises(LoadError, match="exported"):
        load("bad", asked(bad), CPU)
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["weights", "constants"])
def test_pickled_tensors_do_not_run(program, tmp_path, kind):
    mark = tmp_path / "mark"
    first = {"weights": "weight_0", "constants": "tensor_0"}[kind]
    config = config_of(program, f"model_{kind}_config.json").replace('"use_pickle": false', '"use_pickle": true')
    assert '"use_pickle": true' in config
    parts = {f"data/{kind}/model_{kind}_config.json": config, f"data/{kind}/{first}": pickled(mark)}
    with pytest.raises(LoadError, match="exported"):
        load("bad", asked(with_parts(program, parts)), CPU)
    assert not mark.exists()


@pytest.mark.parametrize("prefix", ["custom_obj", "opaque_obj"])
def test_pickled_objects_do_not_run(program, tmp_path, prefix):
    mark = tmp_path / "mark"
    config = config_of(program, "model_constants_config.json").replace("tensor_0", f"{prefix}_0")
    parts = {
        "data/constants/model_constants_config.json": config,
        f"data/constants/{prefix}_0": pickle.dumps(Leaves(mark)),
    }
    with pytest.raises(LoadError, match=f"{prefix}_0"):
        load("bad", asked(with_parts(program, parts)), CPU)
    assert not mark.exists()


def test_whole_pickles_in_the_place_of_tensors_do_not_run(program, tmp_path):
    """As programs of earlier releases have them."""
    mark = tmp_path / "mark"
    bad = with_parts(program, {"data/weights/model.pt": pickled(mark)})
    with pytest.raises(LoadError, match="exported"):
        load("bad", asked(bad), CPU)
    assert not mark.exists()


def test_compiled_libraries_are_refused(program):
    bad = with_parts(program, {"data/aotinductor/model/model.so": b"\x7fELF"})
    with pytest.raises(LoadError, match="aotinductor"):
        load("bad", asked(bad), CPU)


def test_the_environment_is_unchanged(program, monkeypatch):
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)
    load("good", asked(program), CPU)
    with pytest.raises(LoadError):
        shutil.copy(__file__, program)
        load("bad", asked(program), CPU)
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
