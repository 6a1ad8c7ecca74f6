"""The longer tests of learning: with each publication mode, and with a learner that is killed repeatedly."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest
from tests.serving import segments

from jurybox.training.runtime.plan import Kind
from jurybox.training.runtime.run import run
from jurybox.training.runtime.scoreboard import State, Word
from jurybox.training.trainings.marl import MarlTraining, plan
from jurybox.training.trainings.marl_run import train

LEARNING = {
    "algorithm": "ppo",
    "steps": 60_000,
    "learning_rate": 0.001,
    "max_ahead": 256,
    "log_every": 2000,
    "evaluation_episodes": 30,
    "logging": False,
}


class Nothing:
    def scalars(self, step, values): ...


def ratios(evaluation):
    """Return what each agent collects, as a multiple of what it collects at random."""
    return [evaluation[f"eval_return_{agent}"] / evaluation[f"eval_random_{agent}"] for agent in ("agent_0", "agent_1")]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", ["double_buffer", "snapshot"])
def test_both_agents_collect_three_times_as_much_as_random_ones(mode, tmp_path):
    outcome = train(MarlTraining(**LEARNING, publish_mode=mode, log_dir=tmp_path))
    assert min(ratios(outcome.evaluation)) >= 3
    assert outcome.restarts == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_agent_whose_learner_is_killed_every_twenty_seconds_learns_as_much(tmp_path):
    before = segments()
    planned = plan(MarlTraining(**LEARNING, log_dir=tmp_path, checkpoint_every=2000))
    victim = planned.of_kind(Kind.LEARNER)[0]
    killed, last = [], time.monotonic()

    def watch(shared):
        nonlocal last
        words = shared.scoreboard.words[victim]
        # A process may start slowly on a busy machine: it is killed only after ten seconds of work.
        at_work = words[Word.STATE] == State.RUNNING and time.monotonic() - words[Word.READY_AT] / 1e9 > 10
        if time.monotonic() - last < 20 or not at_work:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(words[Word.PID], signal.SIGKILL)
            killed.append(victim)
        last = time.monotonic()

    outcome = run(planned, tmp_path, Nothing(), watch=watch)
    assert outcome.env_steps == LEARNING["steps"] and not outcome.serial
    assert killed and outcome.restarts >= len(killed) - 1, "the last one may have died as the run ended"
    assert min(ratios(outcome.evaluation)) >= 3
    assert segments() <= before
