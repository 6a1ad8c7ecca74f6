"""Agents of one run with different algorithms: each learner has its own pace, rows and device."""

from __future__ import annotations

import csv
from contextlib import contextmanager

import pytest
import torch
from tests.integration.marl.test_marl_training import SMALL

from jurybox.training.checkpoints import Checkpoints
from jurybox.training.runtime import turns
from jurybox.training.runtime.plan import ConfigError, Kind, Pace, PlanError
from jurybox.training.runtime.scoreboard import Word
from jurybox.training.runtime.settings import changes_of
from jurybox.training.runtime.shared_resources import SharedResources
from jurybox.training.runtime.turns import Rules
from jurybox.training.trainings.marl import MarlTraining, plan
from jurybox.training.trainings.marl_run import train

MIXED = {
    **SMALL,
    "algorithm": "ppo",
    "ppo": {"n_steps": 20, "n_epochs": 1},
    "own": {"agent_1": {"algorithm": "dqn"}},
}


@pytest.mark.parametrize("other", [pytest.param("dqn", marks=pytest.mark.runs), "iqn"])
def test_ppo_and_a_replays_algorithm_learn_in_one_run_each_at_its_pace(tmp_path, other):
    own = {"agent_1": {"algorithm": other, "exploration_final_eps": 0.2}}
    outcome = train(MarlTraining(**{**MIXED, "own": own}, log_dir=tmp_path), serial=True)
    latest = Checkpoints(tmp_path / "checkpoints").latest()
    updates = {name: latest.state(f"learner-{name}")["updates"] for name in ("agent_0", "agent_1")}
    assert updates == {"agent_0": 60 // 20, "agent_1": (60 - 20) // 4} and outcome.learner_steps == 13
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    told = {name for row in rows for name, value in row.items() if value}
    assert {"policy_loss_agent_0", "stale_agent_0", "loss_agent_1", "epsilon", "eval_return_agent_1"} <= told
    assert not {"loss_agent_0", "policy_loss_agent_1"} & set(rows[0])


def test_an_agent_learns_the_same_whatever_another_one_learns_with(tmp_path):
    """While nothing is published, the world's rows are the same, and each learner has its own generators."""

    def weights(name, **changes):
        train(MarlTraining(**{**MIXED, "publish_interval": 0, **changes}, log_dir=tmp_path / name), serial=True)
        return Checkpoints(tmp_path / name / "checkpoints").latest().state("learner-agent_0")["learner"]["acting"]

    first = weights("one")
    second = weights("two", own={"agent_1": {"algorithm": "dqn", "learning_rate": 0.01, "batch_size": 4}})
    assert first.keys() == second.keys() and all((first[name] == second[name]).all() for name in first)


def test_each_learner_has_its_own_pace_and_the_actor_waits_for_none_alone():
    planned = plan(MarlTraining(**MIXED))
    ppo, dqn = planned.of_kind(Kind.LEARNER)
    assert planned.pace_of(ppo) == Pace(20, 1, 0, 20, 10.0) and planned.pace_of(dqn) == Pace(4, 1, 20, None)
    assert (
        planned.pace_of_policy("agent_1").learning_starts == 20
        and planned.pace_of_policy("agent_0").learning_starts == 0
    )
    with SharedResources.create(planned) as shared:
        words, rules = shared.scoreboard.words, Rules(planned, shared.scoreboard)
        words[0][Word.ENV_STEPS] = 39
        assert rules.may_collect() and rules.may_learn(ppo) and rules.may_learn(dqn)
        words[0][Word.ENV_STEPS] = 40
        assert rules.may_collect(), "a rollout and its slack, and one of two learners is behind"
        words[dqn][Word.LEARNER_STEPS] = 5
        assert rules.may_learn(ppo) and not rules.may_learn(dqn)
        assert not Rules(planned, shared.scoreboard, serial=True).may_collect()


@pytest.fixture
def still(monkeypatch):
    """No time passes: on a busy machine a learner that the test moves on might seem to stand still."""
    monkeypatch.setattr(turns.time, "monotonic", lambda: 100.0)


@contextmanager
def on_policy(agents, **changes):
    """Rules of a run of so many PPO learners, the words of these, and whether actors may go on at a time and steps."""
    own = {name: MIXED[name] for name in ("algorithm", "ppo", "env_args")}
    planned = plan(MarlTraining(**{**own, "batch_size": 8, "agents": agents, **changes}))
    with SharedResources.create(planned) as shared:
        words, rules = shared.scoreboard.words, Rules(planned, shared.scoreboard)

        def collects(env_steps: int) -> bool:
            words[0][Word.ENV_STEPS] = env_steps
            return rules.may_collect()

        yield [words[number] for number in planned.of_kind(Kind.LEARNER)], collects


@pytest.mark.parametrize(("agents", "free_at"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_actors_wait_while_more_than_half_of_the_learners_are_behind(still, agents, free_at):
    with on_policy(agents) as (learners, collects):
        assert collects(39), "a rollout that is learned from, and one ahead"
        for learner in learners[:free_at]:
            assert not collects(40)
            learner[Word.LEARNER_STEPS] = 1
        assert collects(40) and collects(59)
        assert not collects(60), "and no further than the others learn"


def test_a_limit_that_is_set_holds_for_each_learner():
    with on_policy(3, max_ahead=20) as (learners, collects):
        for learner in learners:
            assert not collects(40)
            learner[Word.LEARNER_STEPS] = 1
        assert collects(40)


def test_a_learner_that_stands_still_is_left_out_as_long_as_its_pace_has_no_patience(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(turns.time, "monotonic", lambda: now[0])
    with on_policy(2) as (learners, collects):
        assert not collects(40)
        now[0] = 109.9
        assert not collects(40)
        now[0] = 110.1
        assert collects(40) and collects(500), "no learner made a step in ten seconds"
        learners[0][Word.LEARNER_STEPS] = 1
        assert not collects(500), "one goes on, and sets the pace"
        learners[0][Word.LEARNER_STEPS] = 24
        assert collects(500)
        learners[1][Word.LEARNER_STEPS] = 1
        assert collects(500) and not collects(520), "so does the other, and again it is one of two"
        now[0] = 121.0
        assert collects(520)


def test_a_limit_that_is_set_is_kept_whatever_a_learner_does():
    assert plan(MarlTraining(algorithm="ppo", max_ahead=256)).pace.patience is None
    with pytest.raises(PlanError, match="patience"):
        Pace(max_ahead=None, patience=1.0)


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_learners_have_the_devices_in_turn(monkeypatch, algorithm):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    changes = {"agents": 3, "own": {"agent_1": {"algorithm": algorithm}}}

    def devices(**given):
        planned = plan(MarlTraining(**changes, **given))
        return [planned.roles[number].settings["device"] for number in planned.of_kind(Kind.LEARNER)]

    assert devices() == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices(learner_gpus=0.5) == ["cuda:0"] * 3
    assert devices(device_per_agent=False) == ["cpu"] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("share", [(), (("agent_0", "agent_1"),)])
def test_ppo_learns_on_a_gpu(tmp_path, share):
    replayed = ("own", "learning_starts", "exploration_initial_eps", "exploration_final_eps")
    changes = {name: value for name, value in MIXED.items() if name not in replayed}
    outcome = train(MarlTraining(**changes, share=share, log_dir=tmp_path), serial=True)
    assert outcome.learner_steps >= 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["own = {agent_1 = {n_steps = 2}}"], "n_steps is set and would have no effect: ppo"),
        (['own = {agent_1 = {algorithm = "dqn", ppo = {n_epochs = 2}}}'], "ppo is set.*the algorithm is dqn"),
        (["train_freq = 8"], "train_freq is set"),
        (['own = {agent_0 = {algorithm = "dqn"}, agent_1 = {algorithm = "iqn"}}', "ppo = {n_steps = 9}"], "ppo is set"),
    ],
)
def test_a_setting_is_refused_if_no_learner_uses_it_and_an_agents_own_if_its_learner_does_not(changes, message):
    with pytest.raises(ConfigError, match=message):
        plan(MarlTraining.read(None, changes_of(changes, {})))
    assert plan(MarlTraining.read(None, changes_of(['own = {agent_1 = {algorithm = "dqn"}}', "train_freq = 8"], {})))
