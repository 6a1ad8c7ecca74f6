"""The toy training in processes: steps count once, the ratio is kept, it ends in order, and nothing is left."""

from __future__ import annotations

import json
import os
import signal

import pytest
from tests.serving import segments
from tests.unit.runtime.toys import Rows, plan

from jurybox.training.interrupts import Signals
from jurybox.training.report.charts import timeline
from jurybox.training.runtime.launching import Local
from jurybox.training.runtime.plan import Budget, End, NotRunning, Timeouts
from jurybox.training.runtime.progress import Timeline
from jurybox.training.runtime.run import run
from jurybox.training.runtime.scoreboard import Word, debug_state


@pytest.fixture(autouse=True)
def nothing_left():
    before = segments()
    yield
    assert segments() - before == set()


def test_processes_make_the_steps_that_the_serial_run_makes(tmp_path):
    rows = Rows()
    trail = tmp_path / "trail"
    outcome = run(
        plan(steps=400, actors=2, actor={"trail": str(trail)}, collect=2, warmup=20, evaluate=200, log_every=100),
        tmp_path,
        rows,
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


def test_a_resumed_run_continues_where_it_ended(tmp_path):
    run(plan(steps=100, actors=2), tmp_path, Rows())
    outcome = run(plan(steps=200, actors=2), tmp_path, Rows(), resume=True)
    assert 200 <= outcome.env_steps <= 201 and outcome.learner_steps == 90
    assert outcome.episodes >= 18


def test_a_stop_ends_it_in_order_with_a_checkpoint(tmp_path):
    signals = Signals()

    def watch(shared):
        if not signals.count and shared.scoreboard.learner_steps:
            signals.ask()

    outcome = run(plan(steps=10**9, timeouts=Timeouts(stop=60.0)), tmp_path, Rows(), signals=signals, watch=watch)
    assert outcome.end is End.SIGNAL
    said = json.loads(next((tmp_path / "checkpoints").glob("step-*/run.json")).read_text())
    assert said["env_steps"] > 0
    assert "stops on request" in (tmp_path / "logs" / "learner.log").read_text()


@pytest.mark.parametrize("serial", [True, False])
def test_time_that_is_up_ends_the_run_with_a_last_evaluation(tmp_path, serial):
    budget = Budget(steps=10**9, seconds=0.5 if serial else 3.0)
    outcome = run(plan(budget=budget, evaluate=10**9, actor={"pause": 0.005}), tmp_path, Rows(), serial=serial)
    assert outcome.end is End.SECONDS
    if not serial and not outcome.env_steps:
        pytest.skip("this machine is too busy to start a process in three seconds")
    assert outcome.evaluation["eval_version"] == 1 + outcome.learner_steps // 5


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


def test_what_a_launcher_notices_is_not_said_in_the_name_of_a_role(tmp_path):
    run(plan(steps=30), tmp_path, Rows(), launcher=Noticing())
    lines = (tmp_path / "logs" / "run.log").read_text().splitlines()
    noticed = [line.partition(" ")[2] for line in lines if "a machine has joined" in line]
    assert noticed == ["a machine has joined"] * 2, "from the processes of both roles"


def test_a_role_that_hangs_is_restarted_and_named(tmp_path):
    outcome = run(plan(steps=150, actor={"hang_at": 40}, timeouts=Timeouts(actor=1.0)), tmp_path, Rows())
    # More restarts where the machine gives one of the others no turn for so long.
    assert outcome.end is End.STEPS and outcome.env_steps == 150 and outcome.restarts >= 1
    assert "actor-0 has given no sign of life" in (tmp_path / "logs" / "run.log").read_text()


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


def test_the_first_signal_reaches_only_the_run(tmp_path):
    """A terminal's Ctrl-C reaches the whole group; roles must not die of it."""
    sent = []

    def watch(shared):
        if not sent and shared.scoreboard.learner_steps:
            sent.append(os.kill(os.getpid(), signal.SIGINT))

    outcome = run(plan(steps=10**9), tmp_path, Rows(), watch=watch)
    assert outcome.end is End.SIGNAL and outcome.restarts == 0
