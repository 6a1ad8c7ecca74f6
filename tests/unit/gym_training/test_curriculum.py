"""A curriculum in both learners: it takes results in order, acts between updates, and goes on after a restart."""

from __future__ import annotations

import dataclasses
import json
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from jurybox.training.replay import Field
from jurybox.training.roles.curriculum import Curriculum, Task, columns
from jurybox.training.runtime.plan import ReplaySpec, load
from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.runtime.shared_resources import SharedResources
from jurybox.training.trainings.gym import GymTraining, plan


class Levels(Curriculum):
    """The next level begins after so many episodes that were won."""

    results = {"won": Field((), "bool")}

    def __init__(self, context: RoleContext, *, wins: int) -> None:
        super().__init__(context)
        self.wins, self.labels, self.closed = wins, [], False

    @property
    def level(self) -> int:
        return len(self.labels) // self.wins

    def published(self):
        return {"level": self.level, "labels": self.labels}

    @staticmethod
    def draw(published, rng):
        return Task(label=int(published["level"]))

    def record(self, episodes):
        self.labels += episodes["label"][episodes["won"]].tolist()

    def between_updates(self, learner):
        assert learner.weights() and learner.context is self.context
        return {"level": self.level}

    def state_dict(self):
        return {"labels": list(self.labels)}

    def load_state_dict(self, state):
        self.labels = list(state["labels"])

    def load_published(self, published):
        self.labels = list(published["labels"])

    def close(self):
        self.closed = True


@contextmanager
def learner_with_levels(algorithm: str, life: int = 1):
    small = {"batch_size": 4, "hidden": (8,), "compile": "never"}
    s = GymTraining.checked({"algorithm": algorithm, "env": "CartPole-v1", **small})
    planned = plan(s)
    number = [role.name for role in planned.roles].index("learner")
    role = planned.roles[number]
    made = {"make": f"{__name__}:Levels", "wins": 2}
    role = dataclasses.replace(role, settings={**role.settings, "curriculum": made}, samples=(*role.samples, "results"))
    planned = dataclasses.replace(
        planned,
        roles=(*planned.roles[:number], role, *planned.roles[number + 1 :]),
        replays=(*planned.replays, ReplaySpec("results", 64, columns(Levels))),
    )
    with SharedResources.create(planned) as shared:
        told: list = []
        learner = load(role.make)(RoleContext(planned, number, shared, told.append, life=life), **role.settings)
        learner.context.metrics = lambda **numbers: told.append(numbers)
        learner.told = told
        try:
            yield learner
        finally:
            learner.close()


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_a_step_gives_the_curriculum_its_results_and_tells_what_it_says(algorithm: str) -> None:
    with learner_with_levels(algorithm) as learner:
        if algorithm == "dqn":
            stream = learner.replay.stream()
            for _ in range(20):
                stream.add(observation=np.zeros(4), action=0, reward=0.0, terminated=False)
        results = learner.context.replay("results")
        for label, won in ((3, True), (4, False), (5, True), (6, True)):
            results.add(label=label, won=won)
        learner.step()
        assert {"level": 1.0} in learner.told
        assert learner.curriculum.labels == [3, 5, 6]
        _, extra = learner.publication()
        published = json.loads(json.dumps(extra))["curriculum"]
        assert learner.curriculum.draw(published, np.random.default_rng(0)) == Task(label=1)
        state, weights, curriculum = learner.save(), learner.weights(), learner.curriculum
    assert curriculum.closed
    with learner_with_levels(algorithm) as learner:
        learner.restore(state)
        assert learner.curriculum.labels == [3, 5, 6]
    with learner_with_levels(algorithm, life=2) as learner:
        learner.adopt(SimpleNamespace(read=lambda: (weights, 1, extra)))
        assert learner.curriculum.labels == [3, 5, 6]


def test_a_curriculum_for_which_nothing_is_due_tells_nothing() -> None:
    with learner_with_levels("ppo") as learner:
        assert Curriculum.between_updates(learner.curriculum, learner) == {}


def test_a_learner_without_a_curriculum_saves_and_publishes_none() -> None:
    s = GymTraining.checked({"algorithm": "dqn", "env": "CartPole-v1", "hidden": (8,)})
    planned = plan(s)
    number = [role.name for role in planned.roles].index("learner")
    with SharedResources.create(planned) as shared:
        role = planned.roles[number]
        learner = load(role.make)(RoleContext(planned, number, shared, lambda message: None), **role.settings)
        assert "curriculum" not in learner.publication()[1] and "curriculum" not in learner.save()
        learner.close()
