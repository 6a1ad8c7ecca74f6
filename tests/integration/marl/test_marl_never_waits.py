"""No learner that is slow or stands still holds up the actor, nor another learner, also with PPO, by default, too."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.marl.test_marl_on_policy import PPO
from tests.serving import segments, wait_until

from jurybox.training.algorithms.ppo import RefinedPPO
from jurybox.training.interrupts import Signals
from jurybox.training.runtime.plan import End
from jurybox.training.runtime.run import run
from jurybox.training.runtime.scoreboard import Word, debug_state
from jurybox.training.trainings import marl
from jurybox.training.trainings.marl import MarlTraining, plan

N_STEPS = PPO["ppo"]["n_steps"]


class SlowPPO(RefinedPPO):
    """Takes at least half a second for an update, and twice as long for the next, on a busy machine long enough."""

    nap = 0.5

    def update(self, batch, progress):
        time.sleep(self.nap)
        self.nap = min(2 * self.nap, 16.0)
        return super().update(batch, progress)


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
            os.kill(pid := words[stopped][Word.PID], signal.SIGSTOP)
            state = Path(f"/proc/{pid}/stat")
            wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", what="the learner's stop")
            metrics.clear()
            seen.update(turns=turns, steps=(words[stopped][Word.LEARNER_STEPS], steps[1]))
        elif seen and "late" not in seen:
            if (
                turns > seen["turns"] + 20 * N_STEPS
                and steps[1] > seen["steps"][1] + 5
                and "policy_loss_agent_0" in metrics
            ):
                assert steps[0] == seen["steps"][0], "it stood still"
                os.kill(words[stopped][Word.PID], signal.SIGCONT)
                seen["late"] = steps[0]
        elif seen and not signals.count and metrics.get("missed_agent_1", 0) > 0 and steps[0] > seen["late"] + 2:
            signals.ask()

    assert run(planned, tmp_path, metrics, watch=watch, signals=signals).end is End.SIGNAL
    assert seen["late"], "what was overwritten meanwhile was counted, and it learned on"
    assert segments() <= before


@pytest.mark.runs
def test_by_default_a_slow_learner_holds_up_nobody_and_drops_what_is_too_old_for_it(tmp_path):
    own = {"steps": 10**9, "seconds": 300.0, "checkpoint_every": 0, "evaluate_every": 0}
    planned = plan(MarlTraining(**{**PPO, **own}))
    slow, other = ([role.name for role in planned.roles].index(f"learner-agent_{number}") for number in (1, 0))
    algorithm = {**planned.roles[slow].settings["algorithm"], "algorithm": f"{__name__}:SlowPPO"}
    changed = replace(planned.roles[slow], settings={**planned.roles[slow].settings, "algorithm": algorithm})
    planned = replace(planned, roles=(*planned.roles[:slow], changed, *planned.roles[slow + 1 :]))
    before, signals, metrics, seen = segments(), Signals(), Metrics(), {}

    def watch(shared):
        board = shared.scoreboard
        steps, updates = board.env_steps, board.words[other][Word.LEARNER_STEPS]
        since = seen.setdefault("step", (board.words[slow][Word.LEARNER_STEPS], steps, updates))
        if since[0] != board.words[slow][Word.LEARNER_STEPS]:
            del seen["step"]
        elif steps > since[1] + 5 * N_STEPS and updates > since[2] + 2:
            seen["within"] = steps - since[1], updates - since[2]  # one update of the slow learner
        if "within" in seen and metrics.get("stale_agent_1", 0) > 0 and not signals.count:
            seen["shown"] = debug_state(tmp_path)
            signals.ask()

    outcome = run(planned, tmp_path, metrics, watch=watch, signals=signals)
    assert outcome.end is End.SIGNAL, "the actor played several rollouts within an update of the slow learner"
    assert outcome.rows_dropped["learner-agent_1"] >= N_STEPS
    (line,) = (line for line in seen["shown"].splitlines() if line.startswith("learner-agent_1"))
    assert "rows dropped" in line
    assert segments() <= before
