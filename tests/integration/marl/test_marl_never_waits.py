"""No learner that stands still holds up the actor, nor another learner, also with PPO, whether it is set so or not."""

from __future__ import annotations

import os
import signal

import pytest
from tests.integration.marl.test_marl_on_policy import PPO
from tests.serving import segments

from jurybox.training.interrupts import Signals
from jurybox.training.runtime.plan import End
from jurybox.training.runtime.run import run
from jurybox.training.runtime.scoreboard import Word
from jurybox.training.trainings import marl
from jurybox.training.trainings.marl import MarlTraining, plan

N_STEPS = PPO["ppo"]["n_steps"]


class Metrics(dict):
    """The newest value of each metric."""

    def scalars(self, step, values):
        self.update(values)


def test_a_limit_is_the_default_with_ppo_and_can_be_taken_away_or_set():
    def slack(**changes):
        return plan(MarlTraining(**changes)).pace.max_ahead

    assert (slack(), slack(max_ahead="none"), slack(max_ahead=0), slack(algorithm="dqn")) == (256, None, 0, None)


@pytest.mark.runs
@pytest.mark.parametrize("ahead", ["auto", "none"])
def test_while_one_learner_stands_still_the_actor_plays_and_the_other_learns(tmp_path, monkeypatch, ahead):
    monkeypatch.setattr(marl, "_PATIENCE", 0.5)
    before, signals, metrics, seen = segments(), Signals(), Metrics(), {}
    own = {"steps": 10**9, "checkpoint_every": 0, "evaluate_every": 0, "learner_timeout": 600.0, "buffer_size": 100}
    planned = plan(MarlTraining(**{**PPO, **own}, max_ahead=ahead))
    stopped, other = (
        [role.name for role in planned.roles].index(name) for name in ("learner-agent_1", "learner-agent_0")
    )

    def watch(shared):
        words, turns = shared.scoreboard.words, shared.scoreboard.env_steps
        steps = words[stopped][Word.LEARNER_STEPS], words[other][Word.LEARNER_STEPS]
        if not seen and min(steps) > 2:
            os.kill(words[stopped][Word.PID], signal.SIGSTOP)
            metrics.clear()
            seen.update(turns=turns, steps=steps)
        elif seen and "late" not in seen:
            if (
                turns > seen["turns"] + 20 * N_STEPS
                and steps[1] > seen["steps"][1] + 5
                and "policy_loss_agent_0" in metrics
            ):
                assert steps[0] <= seen["steps"][0] + 1, "it stood still"
                os.kill(words[stopped][Word.PID], signal.SIGCONT)
                seen["late"] = steps[0]
        elif seen and not signals.count and metrics.get("missed_agent_1", 0) > 0 and steps[0] > seen["late"] + 2:
            signals.ask()

    assert run(planned, tmp_path, metrics, watch=watch, signals=signals).end is End.SIGNAL
    assert seen["late"], "what was overwritten meanwhile was counted, and it learned on"
    assert segments() <= before
