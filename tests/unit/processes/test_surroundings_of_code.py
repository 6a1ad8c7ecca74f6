"""What other people's code changes in this process, and how children are started beside a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest

import jurybox.processes as processes
from jurybox.processes.surroundings import Surroundings


def test_warnings_that_were_made_errors_are_none_again_and_all_other_filters_stay():
    with warnings.catch_warnings():
        warnings.simplefilter("error", BytesWarning)
        before = Surroundings()
        assert not before.restore()
        warnings.simplefilter("ignore", ResourceWarning)
        warnings.simplefilter("error", UserWarning)
        assert len(before.restore()) == 1
        kinds = [(each[0], each[2]) for each in warnings.filters]
    assert ("error", BytesWarning) in kinds and ("ignore", ResourceWarning) in kinds
    assert ("error", UserWarning) not in kinds


def test_a_module_that_is_still_being_imported_tells_nothing_and_is_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert not Surroundings().restore()


@pytest.mark.parametrize("output", [None, 1])
def test_a_child_with_an_output_of_its_own_has_its_own_process_group(monkeypatch, output):
    """A terminal's Ctrl-C reaches the others with their parent, as their output does."""
    started = []
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **given: started.append((command, given)) or SimpleNamespace()
    )
    _, pipe = processes.spawn("some.module", environment={"ONE": "1", "HOME": None}, output=output)
    pipe.close()
    ((command, given),) = started
    assert command[1:3] == ["-m", "some.module"] and command[3] == str(given["pass_fds"][0])
    assert given["process_group"] == (None if output is None else 0)
    assert given["stdout"] == given["stderr"] == output and given["stdin"] == subprocess.DEVNULL
    assert given["env"]["ONE"] == "1" and "HOME" not in given["env"] and given["env"]["PATH"] == os.environ["PATH"]
