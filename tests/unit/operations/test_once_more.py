"""What CI makes of tests that failed: up to three are run once more, alone, and those that pass are named."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.operations.test_install_page import script


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    (tmp_path / "v" / "cache").mkdir(parents=True)
    return tmp_path


def failing(cache: Path, names: list[str]) -> None:
    (cache / "v" / "cache" / "lastfailed").write_text(json.dumps(dict.fromkeys(names, True)))


@pytest.mark.parametrize("again", [0, 1])
def test_a_few_that_failed_are_named_and_run_alone(cache, monkeypatch, capsys, again):
    ran: list[Any] = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: (ran.append(command), SimpleNamespace(returncode=again))[1]
    )
    failing(cache, ["a.py::one", "b.py::two", "c.py::three"])
    assert script("once_more").once_more("python3", cache, "-m", "runs") == (not again)
    (command,) = ran
    assert command[:3] == ["python3", "-m", "pytest"] and command[-2:] == ["-m", "runs"]
    assert f"cache_dir={cache}" in command and "--last-failed" in command
    said = capsys.readouterr().out
    assert "b.py::two" in said and ("unsteady" in said) == (not again)


@pytest.mark.parametrize("names", [None, [], list("abcd")])
def test_more_than_three_or_a_failure_of_no_test_stay_failures(cache, monkeypatch, names):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("they are not run again"))
    if names is not None:
        failing(cache, names)
    assert not script("once_more").once_more("python3", cache)


def test_every_suite_of_ci_follows_the_rule():
    ci = Path(__file__).resolve().parents[3] / ".ci"
    told = (ci / "run").read_text()
    assert "make test || once_more\n" in told and "make test-runs || once_more " in told
    assert "once_more(" in (ci / "pythons.py").read_text()
