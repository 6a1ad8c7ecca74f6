"""`jurybox train plan`: the example of docs/plans.md, run by the command line like a user's plan."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import jurybox.training.runtime as runtime
from jurybox.training import interrupts
from jurybox.training.cli import train as commands
from jurybox.training.runtime.plan import Plan

PAGE = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()
EXAMPLE = re.search(r"```python\n(# bandit\.py\n.*?)```", PAGE, re.DOTALL)[1]


@pytest.fixture
def train(tmp_path):
    (tmp_path / "bandit.py").write_text(EXAMPLE)

    def run(*options):
        line = [sys.executable, "-P", "-m", "jurybox.training.cli", "train", "plan", *map(str, options)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(line, capture_output=True, text=True, timeout=190, cwd=tmp_path, env=environment)

    return run


def test_the_pages_example_has_two_roles_and_fewer_than_sixty_lines():
    assert EXAMPLE.count("RoleSpec(") == 2
    assert len([line for line in EXAMPLE.splitlines() if line.strip() and not line.startswith("# ")]) < 60


@pytest.mark.runs
def test_a_users_plan_is_run_in_processes_recorded_and_resumed(train, tmp_path):
    done = train("--plan", "bandit:plan", "--out", "run", "--steps", 600)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 600 <= summary["env_steps"] <= 601 and not summary["serial"]
    report = (tmp_path / "run" / "report.html").read_text()
    assert "bandit:plan" in report and "Who worked when" in report
    more = train("--plan", "bandit:plan", "--out", "run", "--steps", 900, "--resume")
    assert more.returncode == 0, more.stderr
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert any(row["best"] for row in rows) and int(float(rows[-1]["env_steps"])) >= 900
    other = train("--plan", "bandit:plan", "--out", "run", "--resume", "--set", "arguments.explore = 0.5")
    assert other.returncode == 2 and "other settings" in other.stderr


def test_the_error_of_an_invalid_plan_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "bandit.py").write_text(EXAMPLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, "bandit", raising=False)  # it is found beside the user, whatever came before
    for take in ("take_over", "ignore_from_now_on"):
        monkeypatch.setattr(interrupts, take, lambda *_: None)
    for options, message in (
        ((), "name one with --plan"),
        (("--plan", "nowhere:plan"), "cannot be had"),
        (("--plan", "bandit:Player"), "cannot be called with"),
        (("--plan", "bandit:np.zeros", "--set", "arguments.shape = 1"), "expected a jurybox.training.runtime.Plan"),
    ):
        done = CliRunner().invoke(commands, ["plan", *options, "--out", "run"])
        assert done.exit_code == 2 and message in done.output and "Traceback" not in done.output, done.output


def test_all_public_names_exist_and_are_documented_on_the_page():
    exported = PAGE.partition("## What is exported")[2]
    for name in runtime.__all__:
        assert getattr(runtime, name) is not None
        assert f"`{name}`" in exported, name
    assert runtime.Plan is Plan and set(runtime.__all__) <= set(dir(runtime))
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = runtime.nothing_such
