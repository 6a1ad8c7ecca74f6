"""A name that a module lacks: the message says that the module was found, where, and what it has instead."""

from __future__ import annotations

import os
import sys

import pytest

from jurybox.studies.hockey.original import make_game
from jurybox.training.environments.gymnasium_env import EnvironmentUnusable, make_environment
from jurybox.training.runtime.plan import PlanError, load

GRID = """
import os.path
from pathlib import Path

class Grid:
    pass

def make():
    pass

_hidden = 1
"""


@pytest.fixture
def grid(tmp_path, monkeypatch):
    name = f"grid_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text(GRID)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name, f"module '{name}' ({tmp_path}/{name}.py) has no"
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("call", "error"), [(make_environment, EnvironmentUnusable), (load, PlanError), (make_game, ImportError)]
)
def test_the_message_names_the_module_and_what_it_has(grid, call, error):
    name, found = grid
    with pytest.raises(error) as near:
        call(f"{name}:Grd")
    assert f"{found} 'Grd'; did you mean 'Grid'?" in str(near.value)
    with pytest.raises(error) as far:
        call(f"{name}:environment")
    assert f"{found} 'environment'; there are: Grid, make" in str(far.value)


def test_a_module_that_is_not_found_is_another_error(grid):
    with pytest.raises(EnvironmentUnusable, match="neither in this folder nor on PYTHONPATH"):
        make_environment("no_such_module_anywhere:Grid")
