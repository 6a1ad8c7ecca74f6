"""Factories in the folder that has Jurybox itself, as in a checkout: its own modules are never imported anew."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import jurybox
from jurybox.server.engine.model_code import ModelOrder, load
from jurybox.server.settings.config import ModelSettings

NETS = """
from torch import nn
from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
{imports}
ROW = TensorSpec("float32", (4,))
class Net(nn.Tanh):
    pass
def net():
    return ServedModel(Net(), {{"x": ROW}}, {{"y": ROW}})
"""
UNIQUE = f"beside_{os.getpid()}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of factories, with a part of Jurybox in it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "jurybox").mkdir()
    monkeypatch.setattr(jurybox, "__path__", [*jurybox.__path__, str(tmp_path / "jurybox")])
    yield tmp_path
    for name in [name for name in sys.modules if UNIQUE in name]:
        del sys.modules[name]
    for name in [name for name in vars(jurybox) if UNIQUE in name]:
        delattr(jurybox, name)


def served_class() -> type:
    settings = ModelSettings(factory=f"{UNIQUE}_nets:net").model_dump(mode="json")
    return type(load("m", ModelOrder.of(settings), torch.device("cpu")).model.module)


@pytest.mark.parametrize(
    ("file", "name", "again"),
    [
        (f"jurybox/{UNIQUE}_part.py", f"jurybox.{UNIQUE}_part", False),
        (f"jurybox_{UNIQUE}.py", f"jurybox_{UNIQUE}", True),
    ],
    ids=["of Jurybox", "with a name that begins so"],
)
def test_a_changed_file_beside_a_factory_is_imported_anew_unless_it_is_of_jurybox(
    folder: Path, file: str, name: str, again: bool
) -> None:
    (folder / file).write_text("SCALE = 1")
    (folder / f"{UNIQUE}_nets.py").write_text(NETS.format(imports=f"import {name}"))
    old, part = served_class(), sys.modules[name]
    (folder / file).write_text("SCALE = 22")
    assert (served_class() is not old) == again
    assert (sys.modules[name] is not part) == again
