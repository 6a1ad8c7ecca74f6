"""A whole run killed with kill -9, at any moment: --resume continues it, or reports that there is no checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.serving import segments, wait_until

from jurybox.protocol.segment import sweep
from jurybox.training.run_folder import read_metrics

PAGE = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()
EXAMPLE = re.search(r"```python\n(# bandit\.py\n.*?)```", PAGE, re.DOTALL)[1]
# fmt: off
PLAN = ["plan", "--plan", "bandit:plan", "--set", "steps = {steps}"]
GYM = [
    "gym", "--env", "CartPole-v1", "--algorithm", "dqn", "--set", "steps = {steps}", "--set", "learning_starts = 100",
    "--set", "checkpoint_every = 400", "--set", "evaluate_every = 500", "--set", "evaluation_episodes = 1",
]
PHOTO = [
    "photo", "--set", "steps = {steps}", "--set", "environment.scorer = 'local'", "--workers", "2", "--rollout", "16",
    "--set", "environment.juror = 'tests.unit.studies.photo.cheap_juror:middle_grey'", "--damages", "2",
]
WORKFLOW = [
    "workflow", "--envs", "4", "--total-episodes", "{steps}", "--episode-length", "10",
    "--max-train-episodes-per-env", "2", "--set", "evaluation_episodes = 4",
]
# fmt: on


Moments = list[Callable[[Path], bool]]


def exists(pattern: str) -> Callable[[Path], bool]:
    return lambda out: any(out.glob(pattern))


# What exists when the run is killed; each wait is bounded, because a run may be faster than the test.
MOMENTS: dict[str, Callable[[Path], bool]] = {
    "before anything": lambda out: True,
    "the folder": lambda out: out.is_dir(),
    "settings": exists("settings.json"),
    "a checkpoint being written": exists("checkpoints/.writing-*"),
    "a checkpoint": exists("checkpoints/step-*"),
    "the best being kept": exists("checkpoints/best/*"),
}


def begin(tmp_path: Path, options: list[str], steps: int, *more: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "jurybox.training.cli", "train", *(each.format(steps=steps) for each in options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    return subprocess.Popen(
        [*line, "--out", str(tmp_path / "run"), *more],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip


def kill_when(process: subprocess.Popen[str], moment: Callable[[], bool], timeout: float) -> bool:
    """Kill a run when that is so, and see that its processes end with it; False where it had ended before."""
    children: list[psutil.Process] = []
    until = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < until and not moment():
        time.sleep(0.001)
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    ended = process.wait(30) == -signal.SIGKILL
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, "whoever it started ended with it"
    return ended


def killed_again_and_again(
    tmp_path: Path, options: list[str], steps: int, moments: list[Callable[[Path], bool]]
) -> str:
    """Resume after each kill; return the output of the last run, which is not killed."""
    (tmp_path / "bandit.py").write_text(EXAMPLE)
    out, killed = tmp_path / "run", 0
    before = segments()
    more: tuple[str, ...] = ()
    for number, moment in enumerate(moments):
        for _ in range(2):
            process = begin(tmp_path, options, 10**7, *more)
            try:
                died = kill_when(process, lambda moment=moment: moment(out), 25)
            finally:
                process.kill()
            said = process.communicate()[0]
            assert "Traceback" not in said, f"kill {number}: {said}"
            if died:
                killed += 1
                break
            # So early that nothing was begun: the error says so, and what to do.
            assert process.returncode == 2 and "start without --resume" in said, f"kill {number}: {said}"
            more = ()
        more = ("--resume",) if out.exists() and any(out.iterdir()) else ()
    assert killed == len(moments)
    reached = max((int(path.name[5:]) for path in out.glob("checkpoints/step-*")), default=0)
    last = begin(tmp_path, options, max(steps, reached + 1), *more)
    said = last.communicate(timeout=200)[0]
    assert last.returncode == 0, said
    summary = json.loads((out / "summary.json").read_text())
    assert summary["env_steps"] >= min(steps, reached)
    taken = [row["env_steps"] for row in read_metrics(out / "metrics.csv")]
    assert taken == sorted(taken), "what was done again is recorded once"
    assert not list(out.glob("checkpoints/.*")), "nothing half written is left"
    wait_until(lambda: (sweep(), segments() <= before)[1], 30, "shared memory as it was before")
    return said


@pytest.mark.runs
def test_a_run_that_is_killed_at_any_moment_continues_or_begins_anew(tmp_path):
    said = killed_again_and_again(
        tmp_path, PLAN, 3000, [moment for name, moment in MOMENTS.items() if "best" not in name]
    )
    assert "report:" in said


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [GYM, PHOTO, WORKFLOW], ids=lambda options: options[0])
def test_every_killed_training_can_be_resumed(tmp_path, options):
    moments = [moment for name, moment in MOMENTS.items() if "best" not in name or options is GYM]
    killed_again_and_again(tmp_path, options, 2000 if options is GYM else 64, moments)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_at_twenty_random_moments_continues(tmp_path):
    chance = random.Random(1)

    def later() -> Callable[[Path], bool]:
        seconds, began = chance.uniform(0.0, 6.0), []

        def moment(out: Path) -> bool:
            began.append(time.monotonic())
            return time.monotonic() - began[0] > seconds

        return moment

    killed_again_and_again(tmp_path, PLAN, 3000, [later() for _ in range(20)])


def test_resuming_without_a_run_is_an_error_that_says_what_to_do(tmp_path):
    (tmp_path / "bandit.py").write_text(EXAMPLE)
    process = begin(tmp_path, PLAN, 1000, "--resume")
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 2 and "start without --resume" in said and "Traceback" not in said
