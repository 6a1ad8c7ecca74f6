"""A checkpoint is whole or not there, whatever interrupts its writing; one that cannot be written costs no run."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from pathlib import Path

import pytest
from tests.unit.runtime.toys import Rows, plan

from jurybox.training import checkpoints as module
from jurybox.training.checkpoints import Checkpoints, write_state
from jurybox.training.runtime import serial
from jurybox.training.runtime.orchestrator import Orchestrator
from jurybox.training.runtime.plan import End
from jurybox.training.runtime.process import Reports
from jurybox.training.runtime.run import run
from jurybox.training.runtime.scoreboard import State, Word
from jurybox.training.runtime.shared_resources import counted


class Killed(BaseException):
    pass


def numbers(best):
    return json.loads((best / "evaluation.json").read_text())


def evaluated(checkpoints, value):
    folder = checkpoints.begin()
    (folder / "evaluation.json").write_text(json.dumps({"numbers": {"w": value}}))
    return folder


@pytest.mark.parametrize("kill_at", [1, 2, 3, 4, 5])
def test_a_kill_while_the_best_is_replaced_leaves_the_old_or_the_new_one(tmp_path, monkeypatch, kill_at):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.keep_best(evaluated(checkpoints, 1))
    later = evaluated(checkpoints, 2)
    calls = []

    def dying(real):
        def call(*arguments, **more):
            calls.append(real)
            if len(calls) == kill_at:
                raise Killed
            return real(*arguments, **more)

        return call

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Path, "rename", dying(Path.rename))
        patched.setattr(module, "_sync", dying(module._sync))
        checkpoints.keep_best(later)
    fresh = Checkpoints(tmp_path)
    fresh.sweep()
    assert fresh.best() in ({"numbers": {"w": 1}}, {"numbers": {"w": 2}})
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_checkpoint_that_is_half_removed_is_not_found(tmp_path, monkeypatch):
    run(plan(steps=100, save_every=20), tmp_path, Rows(), serial=True)
    before = Checkpoints(tmp_path / "checkpoints").latest().folder
    steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert steps[-1] == before.name and len(steps) == 2

    def dies(folder, **more):
        if Path(folder).name.startswith("step-"):
            raise Killed
        real(folder, **more)

    real = shutil.rmtree
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(shutil, "rmtree", dies)
        run(plan(steps=140, save_every=20), tmp_path, Rows(), serial=True, resume=True)
    left = [path.name for path in (tmp_path / "checkpoints").glob("step-*/run.json")]
    assert len(left) == 2 and Checkpoints(tmp_path / "checkpoints").latest().env_steps == 120
    outcome = run(plan(steps=140, save_every=20), tmp_path, Rows(), serial=True, resume=True)
    assert outcome.env_steps == 140


@pytest.mark.parametrize("full_at", [1, 2, 3, 4])
def test_a_disk_that_becomes_full_while_a_checkpoint_is_written_leaves_the_one_before_whole(
    tmp_path, monkeypatch, full_at
):
    checkpoints = Checkpoints(tmp_path)
    with checkpoints.writing(10, {"episodes": 1}) as scratch:
        write_state(scratch / "learner.state", {"w": 1.0})
    calls = []

    def full(fd):
        calls.append(fd)
        if len(calls) == full_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.fdatasync(fd)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(os, "fsync", full)
        with checkpoints.writing(20, {"episodes": 2}) as scratch:
            write_state(scratch / "learner.state", {"w": 2.0})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000010"]
    found = Checkpoints(tmp_path).existing()
    assert (found.env_steps, found.document["episodes"], found.state("learner")) == (10, 1, {"w": 1.0})


def test_a_full_disk_costs_checkpoints_and_not_the_run(tmp_path):
    outcome = run(plan(steps=200, learner={"longest_file": 100_000}, save_every=50), tmp_path, Rows())
    assert outcome.end is End.STEPS and outcome.restarts == 0
    assert list((tmp_path / "checkpoints").iterdir()) == []
    said = (tmp_path / "logs" / "run.log").read_text()
    assert "(there is none before): learner could not write its state: [Errno 27] File too large" in said


def test_a_full_disk_costs_a_serial_run_its_checkpoints_only(tmp_path, monkeypatch):
    def full(path, state):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(serial, "write_state", full)
    outcome = run(plan(steps=100, save_every=50), tmp_path, Rows(), serial=True)
    assert outcome.end is End.STEPS and list((tmp_path / "checkpoints").iterdir()) == []
    assert "no checkpoint at 50 steps: [Errno 28] No space left" in (tmp_path / "logs" / "run.log").read_text()


def newest(folder):
    found = Checkpoints(folder / "checkpoints").latest()
    return found.env_steps, counted(found, Word.LEARNER_STEPS)


@pytest.mark.parametrize("slack", [1000, pytest.param(None, marks=pytest.mark.runs)])
def test_the_last_checkpoint_has_the_learner_steps_that_followed_the_last_environment_step(tmp_path, slack):
    outcome = run(plan(steps=100, learner={"pause": 0.01}, slack=slack, save_every=1), tmp_path, Rows())
    assert outcome.end is End.STEPS and newest(tmp_path) == (outcome.env_steps, outcome.learner_steps)


def test_after_the_last_checkpoint_nobody_goes_on_also_where_the_one_before_had_it_all(tmp_path, monkeypatch):
    stop, states = Orchestrator._stop, []

    def stopped(self, reason):
        states.extend(self._scoreboard.words[child.number][Word.STATE] for child in self._savers)
        stop(self, reason)

    monkeypatch.setattr(Orchestrator, "_stop", stopped)
    for attempt in range(10):
        run(plan(steps=100, slack=1000, save_every=1), folder := tmp_path / str(attempt), Rows())
        assert set(states) == {State.PAUSED}
        # Of two, the first was made before the learner had caught up: it did not have it all.
        if (folder / "logs" / "run.log").read_text().count("checkpoint at 100 steps") == 1:
            return
    raise AssertionError("no checkpoint of a last environment step had all learner steps")


@pytest.mark.parametrize("serial", [pytest.param(True, marks=pytest.mark.runs), False])
def test_a_run_whose_last_periodic_checkpoint_failed_tries_once_more_at_its_end(tmp_path, monkeypatch, serial):
    complete, failed = Checkpoints.complete, []

    def full_once(self, scratch, env_steps, document):
        if env_steps == 100 and not failed:
            failed.append(env_steps)
            raise OSError(errno.ENOSPC, "No space left on device")
        return complete(self, scratch, env_steps, document)

    monkeypatch.setattr(Checkpoints, "complete", full_once)
    run(plan(steps=100, learner={"pause": 0.01}, save_every=1), tmp_path, Rows(), serial=serial)
    assert failed and newest(tmp_path) == (100, 40)


def test_the_last_checkpoint_has_the_last_evaluation(tmp_path):
    run(plan(steps=100, save_every=50, evaluate=10**9), tmp_path, Rows(), serial=True)
    gathered = Checkpoints(tmp_path / "checkpoints").latest().document["gathered"]
    assert gathered["evaluation"]["eval_version"] == 9


def test_weights_that_cannot_be_saved_are_reported_and_the_next_good_ones_saved(tmp_path, monkeypatch):
    keep, failed = Checkpoints.keep_best, []

    def full_once(self, folder):
        if not failed:
            failed.append(folder)
            raise OSError(errno.ENOSPC, "No space left on device")
        return keep(self, folder)

    monkeypatch.setattr(Checkpoints, "keep_best", full_once)
    rows = Rows()
    run(plan(steps=100, evaluate=40, best="w"), tmp_path, rows, serial=True)
    assert "checkpoints/best is not of the best evaluation" in (tmp_path / "logs" / "run.log").read_text()
    assert not failed[0].exists()
    later = [values["eval_w"] for _, values in rows if "eval_w" in values][1:]
    assert numbers(tmp_path / "checkpoints" / "best")["numbers"]["w"] == max(later)


def test_an_evaluation_that_is_no_number_is_never_the_best(tmp_path):
    rows = Rows()
    run(plan(steps=100, evaluate=25, judge={"nan_until": 6}, best="liking"), tmp_path, rows, serial=True)
    liking = [values["eval_liking"] for _, values in rows if "eval_w" in values]
    assert math.isnan(liking[0]) and not math.isnan(liking[-1])
    kept = numbers(tmp_path / "checkpoints" / "best")["numbers"]["liking"]
    assert kept == max(each for each in liking if not math.isnan(each))


def test_a_resumed_run_knows_the_best_that_it_evaluated_after_its_last_checkpoint(tmp_path):
    run(plan(steps=100, evaluate=40, best="version"), tmp_path, Rows(), serial=True)
    path = tmp_path / "checkpoints" / "best" / "evaluation.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "numbers": {"version": 10**6}}))
    run(plan(steps=200, evaluate=40, best="version"), tmp_path, Rows(), serial=True, resume=True)
    assert numbers(path.parent)["numbers"]["version"] == 10**6


class Busy:
    """The orchestrator's end of a control pipe that is not read at this moment."""

    def __init__(self):
        self.sent = []

    def writable(self):
        return False

    def send(self, **message):
        self.sent.append(message)


def test_an_evaluation_reaches_an_orchestrator_that_is_busy(tmp_path):
    from jurybox.training.runtime.role_context import RoleContext
    from jurybox.training.runtime.shared_resources import SharedResources

    planned = plan(evaluate=10)
    control_pipe = Busy()
    reports = Reports(control_pipe)
    with SharedResources.create(planned) as shared:
        context = RoleContext(planned, 2, shared, reports, certainly=reports.send_reliably)
        context.say("a line that may be dropped")
        context.evaluated(10, {"w": 1.0})
    assert [message["kind"] for message in control_pipe.sent] == ["evaluation"]
