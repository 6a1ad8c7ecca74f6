"""Resets of environments that take long: every training says how long they may, and roles say that one goes on."""

from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from tests.unit.trainings.test_places import Counted, CountedWorld

from jurybox.studies.hockey.settings import HockeyTraining
from jurybox.studies.hockey.train import plan as plan_of_hockey
from jurybox.training.runtime import role_context
from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.runtime.run import run
from jurybox.training.runtime.scoreboard import Word
from jurybox.training.trainings import gym, marl

HERE = f"{__name__}:"
BOARDS: list = []
TOLD: list[bool] = []


def tell() -> None:
    if BOARDS:
        TOLD.append(sum(bool(words[Word.RESETS_SINCE]) for words in BOARDS[-1].words) == 1)


class Slow(Counted):
    def reset(self, **given):
        tell()
        return super().reset(**given)


class SlowWorld(CountedWorld):
    def reset(self, **given):
        tell()
        return super().reset(**given)


def gym_plan(**more):
    return gym.plan(gym.GymTraining(env=HERE + "Slow", hidden=(4,), n_steps=8, batch_size=8, **more))


def marl_plan(**more):
    return marl.plan(marl.MarlTraining(env=HERE + "SlowWorld", hidden=(4,), ppo={"n_steps": 8}, **more))


@pytest.mark.parametrize("make", [gym_plan, marl_plan])
def test_actors_and_evaluators_say_that_they_reset_an_environment(tmp_path, make) -> None:
    BOARDS.clear()
    TOLD.clear()
    watch = lambda shared: BOARDS or BOARDS.append(shared.scoreboard)  # noqa: E731
    run(make(steps=64, evaluate_every=16, evaluation_episodes=3), tmp_path, Mock(), serial=True, watch=watch)
    assert len(TOLD) > 15 and all(TOLD)
    BOARDS.clear()


@pytest.mark.parametrize(
    "make", [gym_plan, marl_plan, lambda **more: plan_of_hockey(HockeyTraining(**more), Path("out"))]
)
def test_each_training_says_how_long_a_reset_may_take(make) -> None:
    assert make().timeouts.reset == 600.0
    assert (found := make(reset_timeout=1800.0).timeouts).reset == 1800.0
    assert found.start >= 1800.0 and found.save >= 1800.0, "who builds an environment, and who waits for a checkpoint"


def test_a_reset_that_is_over_was_no_silence(monkeypatch) -> None:
    context = RoleContext.__new__(RoleContext)
    context.words, context._mark = memoryview(np.zeros(32, np.int64)), 0
    with context.resetting():
        assert context.words[Word.RESETS_SINCE] > 0
    assert not context.words[Word.RESETS_SINCE] and not context.words[Word.MOVED_AT], "a short one"
    monkeypatch.setattr(role_context, "_LONG_RESET_NS", -1)
    began = time.monotonic_ns()
    with pytest.raises(RuntimeError), context.resetting():
        raise RuntimeError
    assert not context.words[Word.RESETS_SINCE]
    assert context.words[Word.MOVED_AT] >= began and context.words[Word.HEARTBEAT] >= began
