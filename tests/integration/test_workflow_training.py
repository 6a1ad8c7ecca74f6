"""`jurybox train workflow` as a user runs it, and with its policy served."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jurybox.training.cli import train
from jurybox.training.recipes.workflow_run import run
from jurybox.training.search.settings import WorkflowTraining

SMALL = WorkflowTraining(
    envs=4, total_episodes=24, episode_length=10, max_train_episodes_per_env=2, evaluation_episodes=8
)


def returns(folder: Path) -> list[str]:
    with (folder / "metrics.csv").open() as file:
        return [row["return_mean"] for row in csv.DictReader(file)]


def test_a_served_policy_learns_as_one_in_the_process_does(tmp_path) -> None:
    local, served = tmp_path / "local", tmp_path / "served"
    run(SMALL, local)
    run(SMALL.changed(policy="served"), served)
    assert (served / "server.log").exists() and (served / "report.html").exists()
    assert len(returns(local)) == 6 and returns(local) == returns(served)
    summary = json.loads((served / "summary.json").read_text())
    assert summary["episodes"] == 24 and summary["env_steps"] == 240


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", ["local", "served"])
def test_the_command_says_where_its_report_is(tmp_path, policy) -> None:
    command = [sys.executable, "-m", "jurybox.training.cli", "train", "workflow", "--out", str(tmp_path / "run")]
    command += ["--envs", "8", "--total-episodes", "80", "--episode-length", "10"]
    command += ["--max-train-episodes-per-env", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--policy", policy], capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr
    assert "report:" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["episodes"] == 80 and summary["env_steps"] == 800


@pytest.mark.parametrize("bad", [["--red", "Nobody"], ["--env", "mars"], ["--gate", "7"]])
def test_what_cannot_be_is_a_usage_error(tmp_path, bad) -> None:
    done = CliRunner().invoke(train, ["workflow", "--out", str(tmp_path), *bad])
    assert done.exit_code == 2 and bad[0].removeprefix("--") in done.output and "Traceback" not in done.output
