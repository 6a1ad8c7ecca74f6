"""The serial driver keeps the ratio exactly, and depends only on plan and seed."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from tests.unit.runtime.toys import HERE, Rows, Summer, plan

from jurybox.training.checkpoints import Checkpoints
from jurybox.training.replay import Replay
from jurybox.training.runtime.plan import Budget, End, Kind, Pace, Plan, PlanError, PolicyServer, RoleSpec
from jurybox.training.runtime.run import run
from jurybox.training.runtime.serial import Deadlock


def trajectory(folder):
    """The result of a run, from its newest checkpoint: rows in order, weights, counters."""
    checkpoint = Checkpoints(folder / "checkpoints").latest()
    replay = Replay.load(checkpoint.folder / "replay-rows.jbr", f"look-{folder.name}")
    try:
        part = replay.parts[0]
        rows = [part.field_rows(name, 0, len(replay)).copy() for name in ("value", "version")]
    finally:
        replay.unlink()
        replay.close()
    return rows, checkpoint.state("learner")["w"], checkpoint.document["roles"]


def test_the_ratio_holds_after_every_run(tmp_path):
    outcome = run(plan(steps=301, actors=3, collect=4, learn=2, warmup=21), tmp_path, Rows(), serial=True)
    assert outcome.end is End.STEPS and outcome.serial
    assert (outcome.env_steps, outcome.learner_steps) == (301, (301 - 21) // 4 * 2)
    assert outcome.episodes == 30


def test_a_server_that_has_none_of_the_channels_is_not_asked(tmp_path):
    """It may be there for past selves alone."""
    server = PolicyServer("ipc:///nowhere", {}, timeout=1.0)
    assert run(plan(steps=60, server=server), tmp_path, Rows(), serial=True).end is End.STEPS


def test_the_same_seed_gives_the_same_run_and_another_one_does_not(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(plan(seed=seed, actors=2), tmp_path / name, Rows(), serial=True)
    (rows, w, counts), again, other = (trajectory(tmp_path / name) for name in "abc")
    assert all(np.array_equal(one, two) for one, two in zip(rows, again[0], strict=True))
    assert np.array_equal(w, again[1]) and counts == again[2]
    assert not np.array_equal(w, other[1])


def test_a_resumed_run_is_bit_for_bit_the_same_as_one_without_a_stop(tmp_path):
    whole = plan(steps=400, actors=2, save_every=100)
    run(whole, tmp_path / "whole", Rows(), serial=True)
    run(plan(steps=200, actors=2, save_every=100), tmp_path / "halves", Rows(), serial=True)
    outcome = run(whole, tmp_path / "halves", Rows(), serial=True, resume=True)
    assert outcome.env_steps == 400
    one, two = trajectory(tmp_path / "whole"), trajectory(tmp_path / "halves")
    assert all(np.array_equal(a, b) for a, b in zip(one[0], two[0], strict=True))
    assert np.array_equal(one[1], two[1]) and one[2] == two[2]
    assert len(set(one[0][1])) > 10, "the policy was published again and again, or this proves little"


def _numbers(rows):
    return [(step, {k: v for k, v in values.items() if "second" not in k}) for step, values in rows]


def test_the_rows_of_metrics_are_those_of_any_run_with_that_seed_also_of_a_resumed_one(tmp_path):
    whole, again, rest = Rows(), Rows(), Rows()
    training = plan(steps=400, actors=2, save_every=130, log_every=50)  # a checkpoint at 390 is amid a row
    run(training, tmp_path / "whole", whole, serial=True)
    slow = plan(steps=400, actors=2, save_every=130, log_every=50, actor={"pause": 0.003})
    run(slow, tmp_path / "again", again, serial=True)
    assert _numbers(whole) == _numbers(again)
    assert [step for step, values in whole if {"loss", "return_mean"} <= values.keys()] == [*range(50, 401, 50)]
    shutil.rmtree(Checkpoints(tmp_path / "whole" / "checkpoints").latest().folder)  # as if it was killed after 390
    run(training, tmp_path / "whole", rest, serial=True, resume=True)
    assert _numbers(rest) == _numbers(whole)[-1:]


def test_evaluations_come_at_their_interval_and_at_the_end(tmp_path):
    rows = Rows()
    run(plan(steps=250, evaluate=100), tmp_path, rows, serial=True)
    at = [step for step, values in rows if "eval_w" in values]
    assert at == [100, 200, 250]


def test_a_target_ends_the_run_and_marks_the_best(tmp_path):
    budget = Budget(steps=100_000, target=("version", 20))
    outcome = run(plan(budget=budget, evaluate=50, best="version"), tmp_path, Rows(), serial=True)
    assert outcome.end is End.TARGET and outcome.env_steps < 1000
    assert (tmp_path / "checkpoints" / "best" / "evaluation.json").exists()


def test_a_deadlock_is_reported_with_what_each_process_waits_for(tmp_path):
    stuck = plan()
    roles = (stuck.roles[0], RoleSpec("learner", Kind.LEARNER, f"{HERE}:Waiter", samples=("rows",)))
    with pytest.raises(Deadlock, match="learner for steps, actor-0 for weights"):
        run(Plan(roles, stuck.replays, stuck.channels, stuck.pace, stuck.budget), tmp_path, Rows(), serial=True)


def test_actors_do_not_wait_for_a_learner_that_waits_for_their_rows(tmp_path):
    # The learner needs 8 rows, and the pace stops after 2 without it.
    outcome = run(plan(steps=40, collect=1, warmup=1), tmp_path, Rows(), serial=True)
    assert outcome.end is End.STEPS and outcome.learner_steps == 39


def test_weights_are_published_before_the_step_that_made_them_is_counted(tmp_path, monkeypatch):
    shown, publication = [], Summer.publication

    def watched(self):
        shown.append((self.context.scoreboard.learner_steps, self.context.own_steps))
        return publication(self)

    monkeypatch.setattr(Summer, "publication", watched)
    run(plan(steps=60), tmp_path, Rows(), serial=True)
    # The first one is that of new weights. Actors that wait for a step go on as soon as it is counted.
    assert shown[1:] == [(steps - 1, steps) for steps in range(5, 21, 5)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ("tests.unit.runtime.toys:Nobody", "Nobody"),
        ("no.such.module:Thing", "no.such.module"),
        ("justaname", "package.module:callable"),
    ],
)
def test_a_role_that_is_not_there_is_named(tmp_path, make, message):
    alone = Plan((RoleSpec("actor", Kind.ACTOR, make),), budget=Budget(steps=1))
    with pytest.raises(PlanError, match=message):
        run(alone, tmp_path, Rows(), serial=True)


@pytest.mark.parametrize(
    "given",
    [
        {"train_freq": 0}, {"gradient_steps": 0}, {"learning_starts": -1}, {"max_ahead": -1}, {"patience": 0.0},
        {"patience": 1.0, "max_ahead": None}, {"free": True, "max_ahead": 0},
    ],
)  # fmt: skip
def test_a_pace_that_nobody_can_keep_is_refused(given):
    with pytest.raises(PlanError, match="expected"):
        Pace(**given)
    Pace(train_freq=1, gradient_steps=1, learning_starts=0, max_ahead=0, patience=0.1)
    Pace(max_ahead=None, free=True)


def test_a_plan_with_unknown_names_is_refused():
    with pytest.raises(PlanError, match="missing"):
        Plan((RoleSpec("actor", Kind.ACTOR, f"{HERE}:Alone", writes=("missing",)),))
    with pytest.raises(PlanError, match="needs an actor"):
        Plan((RoleSpec("learner", Kind.LEARNER, f"{HERE}:Waiter"),))
    with pytest.raises(PlanError, match="JSON"):
        Plan((RoleSpec("actor", Kind.ACTOR, f"{HERE}:Alone", {"wait": object()}),))
