"""A trainer collects and learns by itself; weights, checkpoints, evaluations and the end are those of all roles."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.unit.runtime.toys import Rows

from jurybox.protocol.weights import WeightsLayout
from jurybox.training.checkpoints import CheckpointError, Checkpoints, read_state
from jurybox.training.interrupts import Signals
from jurybox.training.runtime.plan import Budget, ChannelSpec, End, Kind, Plan, PlanError, RoleSpec, Timeouts
from jurybox.training.runtime.role_context import Diverged, Evaluator, Learner, Made, Trainer
from jurybox.training.runtime.run import run

HERE = __name__
ROLLOUT = 20


class Adder(Trainer):
    """A rollout is twenty steps and an episode; its update adds a random number to the only weight."""

    def __init__(self, context, pause=0.0, diverges_at=None, dies_at=None, mark=None):
        super().__init__(context)
        self.value, self.rollouts = 0.0, 0
        self.random = np.random.default_rng(context.seed)
        self.pause, self.diverges_at, self.dies_at, self.mark = pause, diverges_at, dies_at, mark

    def step(self):
        made = 0
        for made in range(1, ROLLOUT + 1):
            time.sleep(self.pause)
            if not self.context.goes_on(made):
                return Made(made, 0)
        self.rollouts += 1
        if self.rollouts == self.dies_at and self.context.life == 1:
            raise RuntimeError("told to die")
        self.value += float(self.random.random())
        self.context.episode(total=self.value, length=made)
        self.context.metrics(some_loss=float("nan") if self.rollouts == self.diverges_at else self.value)
        return Made(made, 3)

    def publication(self):
        return {"value": np.array([self.value], np.float32)}, None

    def adopt(self, published):
        self.value = float(published.read().state["value"][0])
        if self.mark is not None:
            Path(self.mark).write_text(repr(self.value))

    def save(self):
        return {"value": self.value, "random": self.random.bit_generator.state}

    def restore(self, state):
        self.value = state["value"]
        self.random.bit_generator.state = state["random"]


class Looks(Evaluator):
    def __init__(self, context):
        super().__init__(context)
        self.weights = context.reader()

    def evaluate(self):
        return {"value": float(self.weights.read().state["value"][0])}


def plan(steps=100, evaluator=False, seconds=None, restarts=True, timeouts=None, **settings):
    roles = [RoleSpec("adder", Kind.TRAINER, f"{HERE}:Adder", settings, publishes="value", restarts=restarts)]
    if evaluator:
        roles.append(RoleSpec("looks", Kind.EVALUATOR, f"{HERE}:Looks", reads=("value",), evaluate_every=40))
    return Plan(
        roles=tuple(roles),
        channels=(ChannelSpec("value", WeightsLayout.of({"value": np.zeros(1, np.float32)})),),
        budget=Budget(steps, seconds),
        save_every=40,
        log_every=ROLLOUT,
        best="value" if evaluator else None,
        timeouts=timeouts or Timeouts(),
    )


def trained(planned, folder, **options):
    rows = Rows()
    return run(planned, folder, rows, **options), rows


def state(folder):
    return Checkpoints(folder / "checkpoints").existing().state("adder")


def test_its_steps_are_counted_as_it_says_with_a_row_for_each(tmp_path):
    outcome, rows = trained(plan(90), tmp_path, serial=True)
    assert (outcome.end, outcome.env_steps, outcome.learner_steps, outcome.episodes) == (End.STEPS, 100, 15, 5)
    told = [(step, row["episodes"], row["learner_steps"]) for step, row in rows]
    assert told == [(20, 1, 3), (40, 2, 6), (60, 3, 9), (80, 4, 12), (100, 5, 15)]
    assert rows[-1][1]["some_loss"] == pytest.approx(state(tmp_path)["value"])


def test_a_resumed_run_equals_the_run_at_once(tmp_path):
    trained(plan(200), tmp_path / "once", serial=True)
    trained(plan(80), tmp_path / "parts", serial=True)
    outcome, _ = trained(plan(200), tmp_path / "parts", serial=True, resume=True)
    assert outcome.env_steps == 200
    assert state(tmp_path / "once") == state(tmp_path / "parts")


def test_a_checkpoint_of_a_training_without_roles_is_refused(tmp_path):
    with Checkpoints(tmp_path / "checkpoints").writing(20, {"counted": {}}):
        pass
    with pytest.raises(CheckpointError, match="has the replays None, this plan has"):
        trained(plan(), tmp_path, serial=True, resume=True)


def test_evaluations_see_what_it_publishes_and_the_best_is_kept(tmp_path):
    outcome, _ = trained(plan(100, evaluator=True), tmp_path, serial=True)
    assert outcome.evaluation["eval_value"] == pytest.approx(state(tmp_path)["value"], abs=1e-6)
    assert Checkpoints(tmp_path / "checkpoints").best()["env_steps"] == 100


class Judge(Adder):
    """Evaluates itself after every rollout: not what it publishes, but its double; the values are told."""

    def __init__(self, context, values):
        super().__init__(context)
        self.values = values

    def step(self):
        made = super().step()
        env_steps = self.rollouts * made.env_steps
        double = {"value": np.array([2 * self.value], np.float32)}
        number = self.values[self.rollouts - 1]
        self.context.evaluated(env_steps, {"value": number}, (double, {"environment_arguments": {"level": number}}))
        return made

    def publication(self):
        return super().publication()[0], {"environment_arguments": {"level": -self.rollouts}}


def judged(values, steps=60):
    policy = {"format": 1, "environment_arguments": {"level": 0, "size": 3}}
    roles = (RoleSpec("adder", Kind.TRAINER, f"{HERE}:Judge", {"values": values}, publishes="value"),)
    return replace(plan(steps), roles=roles, best="value", policy=policy, save_every=ROLLOUT)


def test_a_trainer_that_evaluates_itself_has_the_weights_it_names_kept_as_the_best(tmp_path):
    outcome, rows = trained(judged([1, 3, 2]), tmp_path, serial=True)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.best()["env_steps"] == 40 and outcome.evaluation == {"eval_value": 2}
    assert [(step, row["eval_value"]) for step, row in rows if "eval_value" in row] == [(20, 1), (40, 3), (60, 2)]
    best = read_state(checkpoints.folder / "best" / "weights-value.state")["state"]["value"]
    second = checkpoints.folder / f"step-{40:012d}" / "weights-value.state"
    assert best == 2 * read_state(second)["state"]["value"]


def test_weights_may_be_published_with_arguments_of_their_environment(tmp_path):
    trained(judged([1, 3, 2]), tmp_path, serial=True)
    of = lambda place: json.loads((place / "policy.json").read_text())["environment_arguments"]  # noqa: E731
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert of(checkpoints.existing().folder) == {"level": -3, "size": 3}
    assert of(checkpoints.folder / "best") == {"level": 3, "size": 3}


class Goes(Judge):
    def restore(self, state):
        super().restore(state)
        self.rollouts = 3


class Forgets(Goes):
    def restore(self, state):
        super().restore(state)
        self.context.forget_best()


def test_a_run_that_goes_on_may_forget_what_was_its_best(tmp_path):
    for forgets, expected in ((False, 40), (True, 80)):
        folder = tmp_path / str(forgets)
        trained(judged([1, 3, 2, 1]), folder, serial=True)
        longer = judged([1, 3, 2, 1], steps=80)
        role = replace(longer.roles[0], make=f"{HERE}:{'Forgets' if forgets else 'Goes'}")
        trained(replace(longer, roles=(role,)), folder, serial=True, resume=True)
        assert Checkpoints(folder / "checkpoints").best()["env_steps"] == expected


def test_a_loss_that_is_not_finite_ends_it(tmp_path):
    with pytest.raises(Diverged, match="some_loss is nan"):
        trained(plan(diverges_at=2), tmp_path, serial=True)


def test_where_the_time_is_up_the_step_ends_with_what_it_has_made(tmp_path):
    outcome, _ = trained(plan(10_000, seconds=0.1, pause=0.02), tmp_path, serial=True)
    assert outcome.end is End.SECONDS
    assert 0 < outcome.env_steps < ROLLOUT and outcome.learner_steps == 0
    assert Checkpoints(tmp_path / "checkpoints").existing().env_steps == outcome.env_steps


def test_a_stop_leaves_the_step_and_the_checkpoint_before_stands(tmp_path):
    signals = Signals()

    def watch(shared):
        if shared.scoreboard.env_steps == 60 and shared.scoreboard.under_way == 10:
            signals.ask()

    outcome, _ = trained(plan(10_000), tmp_path, serial=True, signals=signals, watch=watch)
    assert (outcome.end, outcome.env_steps) == (End.SIGNAL, 60)
    assert Checkpoints(tmp_path / "checkpoints").existing().env_steps == 40, "it cannot be saved in the midst of a step"


def test_how_far_a_step_is_can_be_watched(tmp_path):
    seen = []
    watch = lambda shared: seen.append(shared.scoreboard.env_steps + shared.scoreboard.under_way)  # noqa: E731
    trained(plan(60), tmp_path, serial=True, watch=watch)
    assert seen == sorted(seen) and set(seen) >= set(range(1, 61))


def test_a_plan_needs_somebody_who_collects():
    with pytest.raises(PlanError, match="needs an actor or a trainer"):
        Plan(roles=(RoleSpec("looks", Kind.EVALUATOR, f"{HERE}:Looks"),))


class Other(Learner):
    def step(self):
        pass


def test_a_role_of_another_kind_is_refused(tmp_path):
    other = Plan(roles=(RoleSpec("adder", Kind.TRAINER, f"{HERE}:Other"),), budget=Budget(20))
    with pytest.raises(TypeError, match="made a Other for adder, expected the Trainer that the plan says"):
        trained(other, tmp_path, serial=True)


@pytest.mark.runs
def test_a_trainer_that_died_is_restarted_with_what_it_published(tmp_path):
    mark = tmp_path / "adopted"
    outcome, _ = trained(plan(100, dies_at=4, mark=str(mark)), tmp_path / "run", serial=False)
    assert (outcome.end, outcome.env_steps, outcome.restarts) == (End.STEPS, 100, 1)
    assert float(mark.read_text()) > 0.0, "three updates were published"


@pytest.mark.runs
def test_in_processes_the_time_ends_a_long_step(tmp_path):
    planned = plan(10_000, seconds=3.0, pause=0.5, timeouts=Timeouts(save=20.0))
    outcome, _ = trained(planned, tmp_path)
    assert outcome.end is End.SECONDS
    assert outcome.env_steps < ROLLOUT and "no checkpoint" not in (tmp_path / "logs" / "run.log").read_text()
