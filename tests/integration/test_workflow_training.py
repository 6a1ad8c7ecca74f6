"""`jurybox train workflow` as a user runs it, and with its policy served."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys

import pytest

SMALL = ["--n-envs", "8", "--total-episodes", "80", "--episode-length", "10", "--max-train-episodes-per-env", "2"]


def train(folder, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jurybox.training.cli", "train", "workflow", "--out", str(folder), *SMALL, *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, check=False)


def returns(folder) -> list[str]:
    with (folder / "metrics.csv").open() as file:
        return [row["return_mean"] for row in csv.DictReader(file)]


def test_a_served_policy_learns_as_one_in_the_process_does(tmp_path) -> None:
    local, served = train(tmp_path / "local"), train(tmp_path / "served", "--policy", "served")
    assert local.returncode == 0, local.stderr
    assert served.returncode == 0, served.stderr
    assert "report:" in served.stdout and (tmp_path / "served" / "server.log").exists()
    assert returns(tmp_path / "local") == returns(tmp_path / "served")
    summary = json.loads((tmp_path / "served" / "summary.json").read_text())
    assert summary["episodes"] == 80 and summary["env_steps"] == 800


@pytest.mark.parametrize("bad", [["--red", "Nobody"], ["--env", "mars"], ["--gate", "7"]])
def test_what_cannot_be_is_a_usage_error(tmp_path, bad) -> None:
    done = train(tmp_path, *bad)
    assert done.returncode == 2 and bad[0] in done.stderr and "Traceback" not in done.stderr
