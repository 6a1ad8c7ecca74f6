"""A fleet of learners on one server: trained at once, stopped, resumed and compared."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from tests.serving import segments, wait_until

LINE = [sys.executable, "-m", "jurybox.training.cli", "train", "gym", "--env", "CartPole-v1", "--n-steps", "64"]
LINE += ["--hidden", "8", "--serial", "--policy", "served", "--set", "evaluation_episodes = 1", "--evaluate-every", "0"]
FLEET = ["--seeds", "0,1", "--vary", "learning_rate=[0.01, 0.001]", "--at-once", "4"]


@pytest.mark.runs
@pytest.mark.timeout(600)
def test_four_learners_of_one_server_are_stopped_resumed_and_compared(tmp_path) -> None:
    before, out = segments(), tmp_path / "fleet"
    line = [*LINE, *FLEET, "--out", str(out), "--set", "checkpoint_every = 256"]
    runs = [out / f"learning_rate={rate}" / f"seed-{seed}" for rate in ("0.01", "0.001") for seed in (0, 1)]
    with subprocess.Popen([*line, "--steps", "1000000"], stdout=subprocess.PIPE, text=True) as process:
        try:
            begun = lambda: all(list(run.glob("checkpoints/step-*")) for run in runs)  # noqa: E731
            wait_until(lambda: process.poll() is not None or begun(), 300, "a checkpoint of each")
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=150)
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert segments() <= before
    steps = [json.loads(sorted(run.glob("checkpoints/step-*"))[-1].joinpath("run.json").read_text()) for run in runs]
    more = [*line, "--steps", "1000000", "--seconds", "5", "--resume"]
    done = subprocess.run(more, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "learning_rate=0.001 is better than learning_rate=0.01 with probability" in done.stdout
    settings = [json.loads((run / "settings.json").read_text()) for run in runs]
    assert len({each["server_group"] for each in settings}) == 1 and len({each["server"] for each in settings}) == 1
    for run, saved in zip(runs, steps, strict=True):
        assert json.loads((run / "summary.json").read_text())["env_steps"] >= saved["env_steps"] >= 256
    assert (out / "report.html").exists() and "failed" not in (out / "server.log").read_text()
    assert segments() <= before
