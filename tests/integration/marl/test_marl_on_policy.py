"""PPO in a multi-agent training: it learns only from its own recent policy, and waits for nothing else."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
from tests.integration.marl.test_marl_training import SMALL, Nothing, rows

from jurybox.training.algorithms.base import Update
from jurybox.training.checkpoints import Checkpoints, read_state, write_state
from jurybox.training.roles.learner import OnPolicyLearner
from jurybox.training.runtime.plan import Kind
from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.runtime.run import run
from jurybox.training.runtime.scoreboard import Word
from jurybox.training.runtime.settings import changes_of
from jurybox.training.runtime.shared_resources import SharedResources
from jurybox.training.runtime.turns import Rules, make_turn
from jurybox.training.trainings.marl import ConfigError, MarlTraining, plan
from jurybox.training.trainings.marl_run import train

# Without the settings that PPO does not use.
PPO = {
    name: value
    for name, value in SMALL.items()
    if name not in ("exploration_initial_eps", "exploration_final_eps", "learning_starts")
}
PPO |= {"algorithm": "ppo", "ppo": {"n_steps": 20, "n_epochs": 2}, "checkpoint_every": 30}


def weights(folder, learner):
    state = Checkpoints(folder / "checkpoints").latest().state(learner)
    return state["updates"], state["learner"]["acting"]


@pytest.mark.runs
def test_a_resumed_serial_training_learns_from_each_rollout_and_depends_on_its_checkpoint_alone(tmp_path):
    def settings(name, steps):
        return MarlTraining(**{**PPO, "steps": steps}, log_dir=tmp_path / name, share=["agent_0", "agent_1"])

    train(settings("one", 50), serial=True)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for name in ("one", "two"):
        train(settings(name, 90), serial=True, resume=True)
    (one, first), (two, second) = (weights(tmp_path / name, "learner-agent_0+agent_1") for name in ("one", "two"))
    assert one == two == 4, "every 20 turns, of which ten were made before the stop"
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.runs
def test_what_learners_dropped_is_in_summary_and_report_and_counted_on_when_resumed(tmp_path, monkeypatch):
    def trained(steps, **options):
        settings = MarlTraining(**{**PPO, "steps": steps}, log_dir=tmp_path)
        outcome = train(settings, serial=True, **options)
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert outcome.rows_dropped == summary["rows_dropped"]
        return outcome.rows_dropped, (tmp_path / "report.html").read_text()

    dropped, report = trained(20)
    assert dropped == {} and re.search("Rows dropped.{,40}none", report, re.DOTALL)
    monkeypatch.setattr(OnPolicyLearner, "_take_rows", dropping(7))
    dropped, report = trained(40, resume=True)
    assert set(dropped) == {"learner-agent_0", "learner-agent_1"} and min(dropped.values()) >= 7
    assert f"{dropped['learner-agent_0']:,} by learner-agent_0" in report
    monkeypatch.undo()
    assert trained(60, resume=True)[0] == dropped


@pytest.mark.runs
def test_processes_make_the_same_trajectory_as_one_process_when_publication_is_frozen(tmp_path):
    settings = MarlTraining(**PPO, publish_interval=0)
    run(plan(settings), tmp_path / "serial", Nothing(), serial=True)
    run(plan(settings), tmp_path / "parallel", Nothing())
    one, two = (rows(tmp_path / name, "agent_1") for name in ("serial", "parallel"))
    assert len(one["action"]) >= 56 and len(set(one["action"].tolist())) > 2
    assert all(np.array_equal(one[name], two[name]) for name in one)


def dropping(rows):
    """`OnPolicyLearner._take_rows` that finds so many overwritten each time."""
    take_rows = OnPolicyLearner._take_rows

    def take(learner):
        learner.context.words[Word.ROWS_DROPPED] += rows
        take_rows(learner)

    return take


@contextmanager
def one_agent(fill=lambda shared, act: None, state=None):
    """The turn of a run's learner, before which `fill` may use the shared memory, and a writer of the actor's rows."""
    settings = MarlTraining(**{**PPO, "agents": 1, "buffer_size": 64})
    planned = plan(settings)
    messages = []
    with SharedResources.create(planned) as shared:
        stream, rng, t = shared.replay("agent_0").stream(), np.random.default_rng(0), iter(range(10**6))

        def act(count, updates):
            for _ in range(count):
                seen = rng.integers(2, size=(2, 2 * 5 * 5 * 5), dtype=np.uint8)
                stream.add(
                    observation=seen[0], action=int(rng.integers(5)), reward=float(rng.random()), terminated=False,
                    next_observation=seen[1], log_prob=float(np.log(0.2)), ended=False, environment=0, t=next(t),
                    updates=updates,
                )  # fmt: skip

        fill(shared, act)
        (number,) = planned.of_kind(Kind.LEARNER)
        context = RoleContext(planned, number, shared, messages.append)
        turn = make_turn(context, Rules(planned, shared.scoreboard), state)
        yield turn, act
        turn.close()


@pytest.fixture
def contexts():
    with one_agent() as made:
        yield made


def test_transitions_of_an_old_policy_are_dropped_and_counted(contexts):
    turn, act = contexts
    learner = turn.role
    act(21, updates=0)
    turn.take()
    assert (learner.updates, learner.stale) == (1, 0)
    act(20, updates=1)
    turn.take()
    assert (learner.updates, learner.stale) == (2, 0)
    act(9, updates=0)
    act(20, updates=1)  # one update old: allowed
    turn.take()
    assert (learner.updates, learner.stale) == (3, 9)


def test_too_few_transitions_wait_for_the_next_step(contexts):
    turn, act = contexts
    learner = turn.role
    act(6, updates=0)
    before = {name: each.clone() for name, each in learner.algorithm.acting.state_dict().items()}
    turn.take()
    assert learner.updates == 0 and turn.context.words[Word.LEARNER_STEPS] == 1, "a step without an update counts"
    assert all(before[name].equal(each) for name, each in learner.algorithm.acting.state_dict().items())
    act(6, updates=0)
    turn.take()
    assert learner.updates == 1 and learner.stale == 0, "the first six were kept"


def test_overwritten_transitions_are_counted(contexts):
    turn, act = contexts
    act(100, updates=0)
    turn.take()
    assert turn.role._cursor.missed == 36 and turn.role.updates == 1
    assert turn.context.words[Word.ROWS_DROPPED] == 36 + turn.role.stale


def test_a_learner_that_fell_behind_learns_from_the_newest_rollouts_and_the_others_are_counted(contexts):
    turn, act = contexts
    learned = []
    turn.role.algorithm.update = lambda rollout, _: learned.append(rollout.log_prob.size) or Update({})
    act(59, updates=0)
    turn.take()
    assert learned == [59] and turn.role.stale == turn.context.words[Word.ROWS_DROPPED] == 0
    act(61, updates=1)
    turn.take()
    assert learned[1] == 41 and turn.role.stale == turn.context.words[Word.ROWS_DROPPED] == 20
    assert turn.context.scoreboard.rows_dropped == {"learner-agent_0": 20}


def test_a_restarted_learner_does_not_learn_twice_from_the_same_transitions(contexts):
    turn, act = contexts
    act(21, updates=0)
    turn.take()
    act(11, updates=1)
    context = turn.context
    turn.close()
    restarted = make_turn(
        RoleContext(context.plan, context.number, context.shared, lambda message: None, life=2),
        Rules(context.plan, context.scoreboard),
        None,
    )
    try:
        assert restarted.role.updates == 1
        assert all(
            one.equal(other)
            for one, other in zip(
                turn.role.algorithm.acting.parameters(), restarted.role.algorithm.acting.parameters(), strict=True
            )
        )
        restarted.take()
        assert restarted.role.updates == 2 and restarted.role.stale == 21, "only transitions of the published policy"
    finally:
        restarted.close()


def test_a_resumed_learner_takes_the_transitions_that_the_actor_added_before_it_was_ready(contexts, tmp_path):
    turn, act = contexts
    act(40, updates=0)
    turn.take()
    assert turn.role.updates == 1
    act(6, updates=1)
    turn.take()
    assert turn.role.updates == 1, "too few for a step, and held"
    act(3, updates=1)
    write_state(tmp_path / "learner.state", turn.role.save())
    act(1, updates=1)  # before the replay itself was saved
    state = read_state(tmp_path / "learner.state")
    turn.context.shared.replay("agent_0").save(tmp_path / "rows")

    def resumed(shared, act):
        shared.replay("agent_0").restore(tmp_path / "rows")
        act(11, updates=1)

    with one_agent(resumed, state) as (second, act):
        learned = []
        second.role.algorithm.update = lambda rollout, _: learned.append(len(rollout.reward)) or Update({})
        second.take()
        assert learned == [6 + 3 + 1 + 11], "all that was not learned from before, and nothing twice"
        act(20, updates=2)
        second.take()
        assert learned == [21, 20]


def test_a_restarted_learner_takes_the_transitions_since_its_checkpoint(contexts):
    turn, act = contexts
    act(11, updates=0)
    state = turn.role.save()
    act(21, updates=0)  # killed before it had trained on them
    context = turn.context
    turn.close()
    again = RoleContext(context.plan, context.number, context.shared, lambda message: None, life=2)
    restarted = make_turn(again, Rules(context.plan, context.scoreboard), state)
    try:
        restarted.take()
        assert restarted.role.updates == 1 and restarted.role.stale == 0
    finally:
        restarted.close()


def test_agents_have_their_own_settings(tmp_path):
    own = {"agent_1": {"algorithm": "iqn", "learning_rate": 0.001, "hidden": [8], "buffer_size": 50}}
    settings = MarlTraining(**SMALL, own=own, log_dir=tmp_path)
    first, second = (settings.of([agent]) for agent in ("agent_0", "agent_1"))
    assert (first.algorithm, second.algorithm, second.learning_rate) == ("dqn", "iqn", 0.001)
    outcome = train(settings, serial=True)
    assert outcome.learner_steps == 20
    states = [Checkpoints(tmp_path / "checkpoints").latest().state(f"learner-agent_{number}") for number in (0, 1)]
    first, second = (state["learner"]["acting"] for state in states)
    assert "layers.0.weight" in first and second["seen.0.weight"].shape[0] == 8


def test_a_setting_of_an_agents_ppo_leaves_its_other_ones_as_the_trainings():
    settings = MarlTraining(
        ppo={"ent_coef": 0.05}, own={"agent_0": {"ppo": {"clip_range": 0.1}}, "agent_1": {"ppo": {"n_epochs": 2}}}
    )
    own = settings.of(["agent_0", "agent_1"]).ppo
    assert (own.ent_coef, own.clip_range, own.n_epochs, own.n_steps) == (0.05, 0.1, 2, 256)
    assert settings.of(["agent_2"]).ppo.clip_range == 0.2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["own = {agent_0 = {steps = 3}}"], "steps is not an agent's"),
        (["own = {agent_0 = {batch_size = 0}}"], "batch_size"),
    ],
)
def test_a_wrong_setting_of_an_agent_is_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        MarlTraining.read(None, changes_of(changes, {}))


def test_a_ring_without_room_for_two_rollouts_is_refused():
    with pytest.raises(ConfigError, match="two rollouts"):
        plan(MarlTraining(**PPO, buffer_size=79, share=["agent_0", "agent_1"]))
    assert plan(MarlTraining(**PPO, buffer_size=80, share=["agent_0", "agent_1"]))
