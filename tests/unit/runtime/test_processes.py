"""The toy training in processes: steps count once, the ratio is kept, it ends in order, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.serving import START, segments, wait_until
from tests.unit.runtime.toys import Rows, plan

from jurybox.training.interrupts import Signals
from jurybox.training.replay import Replay
from jurybox.training.report.charts import timeline
from jurybox.training.runtime.launching import Local
from jurybox.training.runtime.plan import Budget, End, NotRunning, Timeouts
from jurybox.training.runtime.progress import Timeline
from jurybox.training.runtime.run import run
from jurybox.training.runtime.scoreboard import RUNNING, ControlWord, RunScoreboard, State, Word, debug_state

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def nothing_left():
    before = segments()
    yield
    assert segments() - before == set()


class Noticing(Local):
    """Has something to say that is about no role, as a launcher on many machines."""

    def start(self, *arguments):
        process = super().start(*arguments)
        of_role, notices = process.messages, [{"kind": "notice", "text": "a machine has joined"}]

        def messages():
            while notices:
                yield notices.pop()
            yield from of_role()

        process.messages = messages
        return process


def test_processes_make_the_steps_that_the_serial_run_makes(tmp_path):
    rows = Rows()
    trail = tmp_path / "trail"
    outcome = run(
        plan(steps=400, actors=2, actor={"trail": str(trail)}, collect=2, warmup=20, evaluate=200, log_every=100),
        tmp_path,
        rows,
        launcher=Noticing(),
    )
    assert outcome.end is End.STEPS and not outcome.serial and outcome.restarts == 0
    # Two actors may look at the budget in the same moment.
    assert 400 <= outcome.env_steps <= 401
    assert outcome.learner_steps == (400 - 20) // 2
    assert len(trail.read_text().splitlines()) == outcome.env_steps
    assert outcome.evaluation["eval_version"] == 1 + outcome.learner_steps // 5, (
        "the last evaluation saw the last weights"
    )
    assert any("loss" in values for _, values in rows)
    for name in ("actor-0", "actor-1", "learner", "judge", "run"):
        assert (tmp_path / "logs" / f"{name}.log").stat().st_size > 0
    lines = (tmp_path / "logs" / "run.log").read_text().splitlines()
    noticed = [line.partition(" ")[2] for line in lines if "a machine has joined" in line]
    assert noticed == ["a machine has joined"] * 4, "from the processes of all roles, in the name of none"
    lanes = Timeline.read(tmp_path / "timeline.json").lanes
    assert [lane.role for lane in lanes] == ["actor-0", "actor-1", "learner", "judge"]
    assert all(start <= end for lane in lanes for start, end, _ in lane.intervals)
    picture = timeline(Timeline.read(tmp_path / "timeline.json"), "who worked when")
    assert all(f">{lane.role}</text>" in picture.wide for lane in lanes)
    with pytest.raises(NotRunning):
        debug_state(tmp_path)


def test_a_checkpoint_is_made_after_so_many_seconds_however_slow_the_steps_are(tmp_path):
    found, signals = [], Signals()

    def watch(shared):
        found[:] = tmp_path.glob("checkpoints/step-*")
        if len(found) > 1:
            signals.ask()

    run(
        plan(steps=10**9, save_every=10**9, save_seconds=0.1, actor={"pause": 0.01}),
        tmp_path,
        Rows(),
        watch=watch,
        signals=signals,
    )
    assert len(found) == 2


def test_actors_wait_for_a_slow_learner_and_the_learner_never_runs_ahead(tmp_path):
    ahead, states = [], []

    def watch(shared):
        if not states and shared.scoreboard.learner_steps:
            states.append(debug_state(tmp_path))
        learner = shared.scoreboard.words[1]
        ahead.append(shared.scoreboard.env_steps - 20 - 2 * learner[Word.LEARNER_STEPS])

    outcome = run(plan(steps=200, learner={"pause": 0.01}, slack=10), tmp_path, Rows(), watch=watch)
    assert outcome.learner_steps == 90
    # warmup aside: one round of two steps that is being used up, and ten of slack
    assert max(ahead) <= 12 and outcome.busy["actor-0"] < 0.9
    assert "weights policy" in states[0] and "replay  rows" in states[0] and "actor-0" in states[0]


def test_an_actor_that_is_too_far_behind_looks_at_once_and_it_is_counted(tmp_path):
    outcome = run(
        plan(steps=200, collect=1, sync_every=1000, max_lag=2, actor={"pause": 0.003}, slack=5), tmp_path, Rows()
    )
    assert outcome.forced_syncs >= 5


@pytest.mark.runs
def test_a_resumed_run_continues_where_it_ended(tmp_path):
    run(plan(steps=100), tmp_path, Rows())
    outcome = run(plan(steps=200), tmp_path, Rows(), resume=True)
    assert outcome.env_steps == 200 and outcome.learner_steps == 90
    assert outcome.episodes >= 18


def test_the_first_signal_ends_it_in_order_with_a_checkpoint_and_does_not_wait_for_an_evaluation(tmp_path):
    """A terminal's Ctrl-C reaches the whole group; roles must not die of it."""
    asked = []

    def watch(shared):
        if (
            not asked
            and shared.scoreboard.words[2][Word.STATE] == State.RUNNING
            and shared.scoreboard.learner_steps > 100
        ):
            asked.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    planned = plan(steps=10**9, evaluate=20, judge={"pause": 3600.0}, timeouts=Timeouts(stop=60.0))
    outcome = run(planned, tmp_path, Rows(), watch=watch)
    assert outcome.end is End.SIGNAL and outcome.restarts == 0
    said = json.loads(next((tmp_path / "checkpoints").glob("step-*/run.json")).read_text())
    assert said["env_steps"] > 0
    assert "stops on request" in (tmp_path / "logs" / "learner.log").read_text()
    assert time.monotonic() - asked[0] < 30.0


def test_time_that_is_up_ends_a_serial_run_with_a_last_evaluation(tmp_path):
    budget = Budget(steps=10**9, seconds=0.5)
    outcome = run(plan(budget=budget, evaluate=10**9, actor={"pause": 0.005}), tmp_path, Rows(), serial=True)
    assert outcome.end is End.SECONDS
    assert outcome.evaluation["eval_version"] == 1 + outcome.learner_steps // 5


@pytest.mark.runs
def test_time_that_is_up_ends_processes_with_a_last_evaluation_and_learners_that_are_far_behind(tmp_path):
    slow = {"learner": {"pause": 0.05}, "collect": 1, "slack": 10**9}
    planned = plan(budget=Budget(steps=10**9, seconds=3.0), evaluate=10**9, timeouts=Timeouts(save=30.0), **slow)
    outcome = run(planned, tmp_path, Rows())
    if not outcome.env_steps:
        pytest.skip("this machine is too busy to start a process in three seconds")
    assert outcome.end is End.SECONDS and outcome.learner_steps < planned.pace.learner_steps(outcome.env_steps)
    assert outcome.evaluation["eval_version"] == 1 + outcome.learner_steps // 5, "there was no wait of 30 s"


FREE = {"steps": 300, "free": True, "slack": None}


def test_a_serial_run_in_a_free_pace_keeps_the_ratio(tmp_path):
    assert run(plan(**FREE), tmp_path, Rows(), serial=True).learner_steps == (300 - 20) // 2


@pytest.mark.runs
def test_in_a_free_pace_neither_side_has_the_others_speed(tmp_path):
    ratio = (300 - 20) // 2
    fast = run(plan(**FREE, actor={"pause": 0.01}), tmp_path / "fast", Rows())
    assert fast.env_steps == 300 and fast.learner_steps > ratio
    slow = run(plan(**FREE, learner={"pause": 0.1}), tmp_path / "slow", Rows())
    assert slow.env_steps == 300 and slow.learner_steps < ratio


@pytest.mark.parametrize("stopped", ["actor-0", pytest.param("learner", marks=pytest.mark.runs)])
def test_in_a_free_pace_each_side_goes_on_while_the_other_stands_still(tmp_path, stopped):
    planned = plan(
        steps=10**9, free=True, slack=None, actor={"pause": 0.001}, timeouts=Timeouts(actor=600, learner=600)
    )
    signals, seen = Signals(), {}

    def watch(shared):
        names = [role.name for role in planned.roles]
        words = shared.scoreboard.words[names.index(stopped)]
        made = shared.scoreboard.learner_steps if stopped == "actor-0" else shared.scoreboard.env_steps
        if not seen and shared.scoreboard.learner_steps > 10:
            os.kill(words[Word.PID], signal.SIGSTOP)
            seen.update(pid=words[Word.PID], at=made)
        elif seen and not signals.count and made > seen["at"] + 300:
            os.kill(seen["pid"], signal.SIGCONT)
            signals.ask()

    assert run(planned, tmp_path, Rows(), watch=watch, signals=signals).end is End.SIGNAL and seen


def test_a_role_that_always_fails_ends_the_run_with_its_reason(tmp_path):
    timeouts = Timeouts(failures=2, back_off=(0.0,))
    outcome = run(plan(actor={"fail_at": 30}, timeouts=timeouts), tmp_path, Rows())
    assert outcome.end is End.FAILED
    assert "actor-0" in outcome.text and "2 times in a row" in outcome.text
    assert "told to fail" in outcome.text and str(tmp_path / "logs" / "actor-0.log") in outcome.text
    assert "told to fail" in (tmp_path / "logs" / "actor-0.log").read_text()
    assert "told to fail" in (tmp_path / "logs" / "run.log").read_text()


def test_a_failed_run_continues_serially_if_requested(tmp_path):
    timeouts = Timeouts(failures=1, actor=1.0)
    outcome = run(plan(steps=150, actor={"hang_at": 40}, timeouts=timeouts, on_failure="serial"), tmp_path, Rows())
    assert outcome.serial and outcome.end is End.STEPS
    assert outcome.env_steps == 150 and outcome.learner_steps == 65
    assert outcome.text == End.STEPS.value, "the failure is over"
    log = (tmp_path / "logs" / "run.log").read_text()
    assert "1 times in a row (limit: 1)" in log and log.endswith(f"the run is over: {End.STEPS.value}\n")


def test_a_role_that_hangs_is_restarted_and_named(tmp_path):
    outcome = run(plan(steps=150, actor={"hang_at": 40}, timeouts=Timeouts(actor=1.0)), tmp_path, Rows())
    # More restarts where the machine gives one of the others no turn for so long.
    assert outcome.end is End.STEPS and outcome.env_steps == 150 and outcome.restarts >= 1
    assert "actor-0 has given no sign of life" in (tmp_path / "logs" / "run.log").read_text()


@pytest.mark.runs
def test_a_role_that_hangs_in_every_life_ends_the_run(tmp_path):
    signals = Signals()

    def watch(shared):
        if shared.scoreboard.control[:, ControlWord.RESTARTS].sum() > 4:
            signals.ask()  # the time in which it hung passes for work, and this would go on for ever

    # Silent for longer than what makes a role settled.
    timeouts = Timeouts(actor=1.0, settled=0.2, failures=2, back_off=(0.0,))
    planned = plan(actor={"hang_at": 0, "hangs": 100}, timeouts=timeouts)
    outcome = run(planned, tmp_path, Rows(), watch=watch, signals=signals)
    assert outcome.end is End.FAILED and "2 times in a row" in outcome.text


def test_a_dead_role_is_noticed_while_a_child_that_it_forked_lives(tmp_path):
    signals, began, child = Signals(), time.monotonic(), tmp_path / "child"

    def watch(shared):
        if time.monotonic() - began > 60.0:
            signals.ask()

    planned = plan(steps=100, actor={"fork_at": 40, "child": str(child)})
    try:
        outcome = run(planned, tmp_path, Rows(), watch=watch, signals=signals)
        os.kill(int(child.read_text()), 0)  # its end is not what was noticed
        assert outcome.end is End.STEPS and outcome.restarts == 1 and outcome.env_steps == 100
    finally:
        os.kill(int(child.read_text()), signal.SIGKILL)
    assert "was killed by signal 9; restarting it" in (tmp_path / "logs" / "run.log").read_text()


PAUSED = """
import sys
from pathlib import Path
from tests.unit.runtime.toys import Rows, plan
from jurybox.training.runtime import orchestrator
from jurybox.training.runtime.plan import Timeouts
from jurybox.training.runtime.run import run
orchestrator._AWAY_SECONDS = 1.0
timeouts = Timeouts(actor=6.0, learner=6.0, evaluator=6.0)
run(plan(steps=10**9, actors=2, actor={"pause": 0.001}, evaluate=10**9, timeouts=timeouts), Path(sys.argv[1]), Rows())
"""


@pytest.mark.runs
def test_a_pause_of_all_processes_longer_than_roles_may_be_silent_kills_none(tmp_path):
    """As `docker pause` does."""
    running = subprocess.Popen([sys.executable, "-c", PAUSED, str(tmp_path)], cwd=ROOT)
    try:
        wait_until((tmp_path / RUNNING).exists, START)
        scoreboard = RunScoreboard.attach(json.loads((tmp_path / RUNNING).read_text())["scoreboard"], keep_alive=False)
        wait_until(lambda: all(words[Word.STATE] == State.RUNNING for words in scoreboard.words), START, "all roles")
        roles = [words[Word.PID] for words in scoreboard.words]
        for pid in (running.pid, *roles):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(8.0)
        os.kill(running.pid, signal.SIGCONT)
        time.sleep(0.5)  # it looks before the others show that they are alive again
        for pid in roles:
            os.kill(pid, signal.SIGCONT)
        before = scoreboard.env_steps
        wait_until(lambda: scoreboard.env_steps > before + 100, START, "a hundred steps after the pause")
        assert roles == [words[Word.PID] for words in scoreboard.words]
        scoreboard.close()
        running.send_signal(signal.SIGTERM)
        running.wait(60)
    finally:
        running.kill()
        running.wait()
    assert "no sign of life" not in (tmp_path / "logs" / "run.log").read_text()


def test_the_sums_of_priorities_that_a_killed_role_left_wrong_are_corrected_at_the_next_checkpoint(
    tmp_path, monkeypatch
):
    sums, killed, signals, repair = [], [], Signals(), Replay.repair

    def watched(replay):
        part = replay.parts[0]
        before = part.ring.total_priority
        repair(replay)
        sums.append((before, part.ring.total_priority, int(part.leaves.sum())))

    def watch(shared):
        words, folders = shared.scoreboard.words[1], list(tmp_path.glob("checkpoints/step-*"))
        if not killed and folders and words[Word.PID]:
            os.kill(words[Word.PID], signal.SIGKILL)
            shared.replay("rows").parts[0].leaves[0] += 10**6  # a priority whose sums were not set any more
            killed.extend(folders)
        elif killed and any(folder not in killed for folder in folders):
            signals.ask()

    monkeypatch.setattr(Replay, "repair", watched)
    planned = plan(steps=10**9, actor={"pause": 0.001}, save_every=200)
    planned = replace(planned, replays=(replace(planned.replays[0], prioritized=True),))
    outcome = run(planned, tmp_path, Rows(), watch=watch, signals=signals)
    assert outcome.end is End.SIGNAL and outcome.restarts == 1
    ((before, after, right),) = sums
    assert after == right == before + 10**6


@pytest.mark.runs
def test_a_killed_role_joins_where_the_others_are(tmp_path):
    killed = []

    def watch(shared):
        for number, least in ((0, 60), (2, 100)):
            words = shared.scoreboard.words[number]
            if number not in killed and shared.scoreboard.env_steps >= least and words[Word.PID]:
                os.kill(words[Word.PID], signal.SIGKILL)
                killed.append(number)

    trail = tmp_path / "trail"
    outcome = run(
        plan(steps=400, actors=2, actor={"trail": str(trail), "pause": 0.01}, learner={"pause": 0.001}, slack=20),
        tmp_path,
        Rows(),
        watch=watch,
    )
    assert killed == [0, 2] and outcome.restarts == 2 and outcome.end is End.STEPS
    # Every step counted was made; one that was begun may not have been counted.
    begun = len(trail.read_text().splitlines())
    assert outcome.env_steps <= begun <= outcome.env_steps + 1
    assert outcome.learner_steps == 190
