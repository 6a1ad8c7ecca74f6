"""Any process of a run may be killed at any moment: the run continues, no step counts twice, no memory leaks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.serving import segments
from tests.unit.runtime.toys import Rows, plan

from jurybox.protocol.segment import sweep
from jurybox.training.interrupts import Signals
from jurybox.training.runtime.plan import End, Timeouts
from jurybox.training.runtime.run import run
from jurybox.training.runtime.scoreboard import RUNNING, ControlWord, RunScoreboard, Word

RUN = """
import sys
from pathlib import Path
from tests.unit.runtime.toys import Rows, plan
from jurybox.training.runtime.run import run
run(plan(steps=10**9, actors=2, actor={"pause": 0.001}, evaluate=1000), Path(sys.argv[1]), Rows())
"""


def alive(pid: int) -> bool:
    """Whether it runs; one that is only waiting to be buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.02)
    return found


def killed_in_turn(folder: Path, times: int, seconds: float) -> tuple[int, object, dict[str, list[int]]]:
    """Run the toy training, and kill its processes in turn, so many times and so many seconds apart.

    Before each kill the run must have recovered from the one before.
    """
    kills, seen, signals = [], [time.monotonic(), 0], Signals()
    trails = {name: str(folder / name) for name in ("actors", "learner")}

    def watch(shared):
        now, steps = time.monotonic(), shared.scoreboard.env_steps
        if now - seen[0] < seconds or steps < seen[1] + 100:
            return
        if shared.scoreboard.control[:, ControlWord.RESTARTS].sum() < len(kills):
            return  # the killed process has not ended yet
        if len(kills) == times:
            signals.ask()
            return
        victim = len(kills) % len(shared.scoreboard.words)
        pid = shared.scoreboard.words[victim][Word.PID]
        if pid and alive(pid):
            os.kill(pid, signal.SIGKILL)
            kills.append(victim)
            seen[:] = [now, steps]

    outcome = run(
        plan(
            steps=10**9,
            actors=2,
            actor={"trail": trails["actors"], "pause": 0.0005},
            learner={"trail": trails["learner"]},
            timeouts=Timeouts(failures=1000, back_off=(0.0, 0.1)),
            evaluate=500,
            save_every=2000,
        ),
        folder,
        Rows(),
        watch=watch,
        signals=signals,
    )
    begun = {name: len(Path(path).read_text().splitlines()) for name, path in trails.items()}
    return len(kills), outcome, begun


def check_counts(kills, outcome, begun):
    assert outcome.end is End.SIGNAL
    assert outcome.restarts == kills, "each death was noticed once"
    # A step that was begun counts once when it is finished, and those that death cut short do not count.
    assert outcome.env_steps <= begun["actors"] <= outcome.env_steps + kills
    assert outcome.learner_steps <= begun["learner"] <= outcome.learner_steps + kills


def test_a_run_survives_the_death_of_any_process(tmp_path):
    before = segments()
    kills, outcome, begun = killed_in_turn(tmp_path, times=4, seconds=0.3)
    assert kills == 4
    check_counts(kills, outcome, begun)
    assert segments() <= before


@pytest.mark.slow
def test_a_run_survives_five_minutes_of_kills(tmp_path):
    before = segments()
    kills, outcome, begun = killed_in_turn(tmp_path, times=30, seconds=10.0)
    assert kills == 30
    check_counts(kills, outcome, begun)
    assert segments() <= before


def test_nothing_outlives_a_killed_orchestrator_but_memory_that_the_next_start_frees(tmp_path):
    before = segments()
    process = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path)])
    try:
        mark = tmp_path / RUNNING
        wait_for(mark.exists)
        scoreboard = RunScoreboard.attach(json.loads(mark.read_text())["scoreboard"], keep_alive=False)
        wait_for(lambda: scoreboard.learner_steps > 10 and all(words[Word.PID] for words in scoreboard.words))
        pids = [words[Word.PID] for words in scoreboard.words]
        assert len(pids) == 4 and all(map(alive, pids))
        process.kill()
        process.wait()
        wait_for(lambda: not any(map(alive, pids)), seconds=30.0)
        scoreboard.close()
    finally:
        process.kill()
        process.wait()
    assert segments() - before, "it was killed before it could remove them"

    def swept():
        # A killed process is a zombie before its last thread let go of the files it held.
        sweep()
        return segments() <= before

    wait_for(swept, seconds=30.0)


def test_a_second_signal_ends_at_once(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path)])
    try:
        wait_for((tmp_path / RUNNING).exists)
        wait_for((tmp_path / "logs" / "learner.log").exists)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / RUNNING).exists()
