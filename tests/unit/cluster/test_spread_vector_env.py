"""The rows of a worker behave as the same environments on one machine, and go on when it is replaced."""

from __future__ import annotations

import sys
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from tests.unit.cluster.workers_here import WorkersHere
from tests.unit.vector.vector_environments import Counter, Nested

from jurybox.cluster.vector_env import WorkerGroups, WorkerRows
from jurybox.studies.workflow import environments
from jurybox.studies.workflow.cage import CageRows, CageVectorEnv
from jurybox.studies.workflow.networks import DefendedNetworks
from jurybox.studies.workflow.rollouts import play
from jurybox.studies.workflow.settings import WorkflowTraining


def counters(count: int, groups: int = 1) -> tuple[WorkersHere, list[WorkerRows]]:
    """A worker with so many counting environments in every group."""
    own = [partial(SyncVectorEnv, [partial(Counter, i) for i in range(count)])] * groups
    workers = WorkersHere([partial(WorkerGroups, own)])
    return workers, [WorkerRows(workers, 0, group, count) for group in range(groups)]


def same(left, right) -> None:
    """Trees of arrays are equal, and so are their dtypes."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for name in left:
            same(left[name], right[name])
    elif isinstance(left, tuple):
        for each, other in zip(left, right, strict=True):
            same(each, other)
    else:
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("make", [partial(Counter, 0), Nested])
def test_a_group_behaves_like_its_environments_in_one_process(make) -> None:
    rows = WorkerRows(WorkersHere([partial(WorkerGroups, [partial(SyncVectorEnv, [make] * 3)])]), 0, 0, 3)
    together = SyncVectorEnv([make] * 3)
    same(rows.reset(seed=40), together.reset(seed=40))
    for _ in range(5):  # over the end of an episode and the reset after it
        actions = together.action_space.sample() if make is Nested else np.zeros(3, np.int64)
        same(rows.step(actions), together.step(actions))


def test_the_rows_of_a_worker_that_is_gone_are_cut_and_begin_anew() -> None:
    workers, (env,) = counters(2)
    env.reset(seed=40)
    before = env.step(np.zeros(2, np.int64))[0]
    env.step_async(np.zeros(2, np.int64))
    workers.die(0)
    observations, rewards, terminated, truncated, infos = env.step_wait()
    assert truncated.all() and not terminated.any() and infos.keys() == {"restarted"} and infos["restarted"].all()
    np.testing.assert_array_equal(observations, before)
    assert rewards.tolist() == [0, 0]
    observations, rewards, _, truncated, infos = env.step(np.zeros(2, np.int64))
    assert rewards.tolist() == [0, 0] and not truncated.any() and "restarted" not in infos
    assert observations[:, 3].tolist() == [0, 0], "the rows' step was the reset"
    assert observations[0, 1] not in (40, -1) and observations[1, 1] == observations[0, 1] + 1, "seeds of their own"
    assert env.step(np.zeros(2, np.int64))[1].tolist() == [1, 1]
    assert workers.restarts == 1


def test_both_halves_notice_a_worker_that_is_gone() -> None:
    workers, (one, other) = counters(1, groups=2)
    for env in (one, other):
        env.reset(seed=3)
        env.step_async(np.zeros(1, np.int64))
    workers.die(0)
    assert one.step_wait()[3].tolist() == [True]
    one.step_async(np.zeros(1, np.int64))
    assert other.step_wait()[3].tolist() == [True], "its step went down with the same worker"
    assert one.step_wait()[0][:, 3].tolist() == [0]
    assert workers.restarts == 1


@pytest.mark.parametrize("moment", ["idle", "in a reset", "in a step that is left"])
def test_a_worker_that_dies_between_episodes_costs_none(moment) -> None:
    workers, (env,) = counters(1)
    env.reset(seed=3)
    if moment == "in a step that is left":
        env.step_async(np.zeros(1, np.int64))
    workers.die(0)
    if moment == "idle":
        assert env.call("num_envs") == (1,), "the new one answers"
    observations, _ = env.reset()
    assert observations[:, 3].tolist() == [0] and observations[0, 1] > 3, "seeded anew"
    assert not env.step(np.zeros(1, np.int64))[3].any()


def test_an_idle_workers_death_is_reported_at_the_next_step() -> None:
    workers, (env,) = counters(1)
    env.reset(seed=3)
    workers.die(0)
    env.call("num_envs")
    workers.asked.clear()
    assert env.step(np.zeros(1, np.int64))[3].tolist() == [True]
    assert workers.asked == [(0, "reset")], "no step of an episode that never began"


def test_a_step_is_asked_for_once_and_received_once() -> None:
    _, (env,) = counters(1)
    env.reset(seed=3)
    with pytest.raises(RuntimeError, match="call step_async first"):
        env.step_wait()
    env.step_async(np.zeros(1, np.int64))
    with pytest.raises(RuntimeError, match="receive its results first"):
        env.step_async(np.zeros(1, np.int64))


def test_what_a_step_returns_that_a_reset_leaves_is_taken_and_dropped() -> None:
    workers, (env,) = counters(1)
    env.reset(seed=3)
    env.step_async(np.zeros(1, np.int64))
    assert env.reset()[0][:, 3].tolist() == [0], "the reset's own answer"
    assert workers.unread == 0, "the step's would be kept for as long as the workers live"


@pytest.mark.parametrize("counts", [(12,), (5, 7), (1, 4, 4, 3)])
def test_networks_are_the_same_however_they_are_shared_out(counts) -> None:
    whole = CageVectorEnv(12, "Meander", episode_length=6, autoreset_mode="Disabled")
    firsts = np.cumsum([0, *counts])[:-1].tolist()
    makers = [
        partial(CageRows, count, "Meander", first=first, of=12, episode_length=6, autoreset_mode="Disabled")
        for first, count in zip(firsts, counts, strict=True)
    ]
    workers = WorkersHere([partial(WorkerGroups, [make]) for make in makers])
    spread = DefendedNetworks([WorkerRows(workers, worker, 0, n) for worker, n in enumerate(counts)], 6)
    together = DefendedNetworks([whole], 6)
    random = np.random.default_rng(0)
    for seed in (5, None):
        whole.reset(seed=seed)
        for part, first in zip(spread._parts, firsts, strict=True):
            part[0].reset(seed=None if seed is None else seed + first)
        spread.reset(), together.reset()
        for _ in range(6):
            actions = random.integers(0, 145, 12)
            (ours,), (theirs,) = spread.step(actions).results, together.step(actions).results
            same((ours.rows, ours.reward, ours.truncated), (theirs.rows, theirs.reward, theirs.truncated))
    assert spread._parts[0][0].call("random_state")[0] == whole.networks.random.bit_generator.state


class Scripted:
    """Acts by its observation, so that episodes are the same for any assignment of rows."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def act(self, observations, masks=None, *, greedy=False):
        self.asked.append(len(observations))
        seen = observations[:, :52].astype(np.int64) @ np.arange(1, 53) % 145
        return seen, np.zeros(len(seen), np.float32), seen.astype(np.float32)


def test_episodes_played_in_halves_are_those_played_at_once() -> None:
    settings = WorkflowTraining(envs=7, total_episodes=70, episode_length=15, use_masks=True)
    halved = WorkflowTraining(envs=7, total_episodes=70, episode_length=15, use_masks=True, halves=True)
    at_once, by_halves = Scripted(), Scripted()
    options = {"steps": 15, "weight": 30.0, "use_masks": True}
    rollout, episodes = play(environments.make(settings, 0), at_once, range(5), **options)
    other, others = play(environments.make(halved, 0), by_halves, range(5), **options)
    assert by_halves.asked == [4, 3] * 15 + [7] and at_once.asked == [7] * 16
    np.testing.assert_array_equal(episodes.returns, others.returns)
    for name in ("fixes", "complied", "judged", "obeyed"):
        np.testing.assert_array_equal(getattr(episodes, name), getattr(others, name))
    for name in ("observation", "action", "reward", "value", "ended", "terminated", "mask", "last_value"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(other, name), err_msg=name)


def test_the_next_half_is_acted_for_while_the_first_steps() -> None:
    settings = WorkflowTraining(envs=4, total_episodes=40, episode_length=3)
    rows = [range(2), range(2, 4)]
    workers = WorkersHere([partial(WorkerGroups, [environments.maker(settings, each) for each in rows])])
    halves = [[WorkerRows(workers, 0, group, 2)] for group in range(2)]
    said = workers.asked
    policy = Scripted()
    act = policy.act
    policy.act = lambda *a, **k: (said.append((0, "act")), act(*a, **k))[1]
    play(halves, policy, None, steps=2, weight=0.0)
    assert [what for _, what in said] == ["reset", "reset", *("act", "call") * 4, "act"]


@pytest.mark.parametrize("halves", [False, True])
def test_networks_on_a_cluster_are_those_of_one_machine(monkeypatch, halves) -> None:
    def workers(makers, needs):
        return closing(WorkersHere(makers))

    monkeypatch.setitem(sys.modules, "jurybox.cluster.env_workers", SimpleNamespace(EnvWorkers=workers, Needs=None))
    settings = WorkflowTraining(envs=7, total_episodes=70, episode_length=5, use_masks=True, halves=halves, workers=2)
    options = {"steps": 5, "weight": 30.0, "use_masks": True}
    with (
        environments.networks(settings) as here,
        environments.networks(settings, {"cores": 9, "needs": None}) as away,
    ):
        for splits, others in zip(here[:2], away[:2], strict=True):
            assert [len(each) for each in others] == [2] * len(splits)
            first, second = Scripted(), Scripted()
            rollout, episodes = play(splits, first, range(5), **options)
            other, counted = play(others, second, range(5), **options)
            assert first.asked == second.asked
            np.testing.assert_array_equal(episodes.returns, counted.returns)
            for name in ("observation", "action", "reward", "ended", "mask", "last_value"):
                np.testing.assert_array_equal(getattr(rollout, name), getattr(other, name), err_msg=name)
            saved = environments.random_state(settings, splits)
            assert saved == environments.random_state(settings, others)
            environments.restore_random_state(settings, others, saved)


def test_all_workers_of_a_split_reset_and_step_at_the_same_time() -> None:
    settings = WorkflowTraining(envs=4, total_episodes=40, episode_length=2)
    rows = [range(2), range(2, 4)]
    workers = WorkersHere([partial(WorkerGroups, [environments.maker(settings, each)]) for each in rows])
    answer, said = workers.answer, workers.asked
    workers.answer = lambda asked: (said.append((asked[0], "answered")), answer(asked))[1]
    parts = [WorkerRows(workers, worker, 0, 2) for worker in range(2)]
    environments.reset(parts, settings, 0, rows)
    play([parts], Scripted(), None, steps=2, weight=0.0)
    both = [(0, "answered"), (1, "answered")]
    asked = [*[[(0, "reset"), (1, "reset")]] * 2, *[[(0, "call"), (1, "call")]] * 2]
    assert said == [each for pair in asked for each in (*pair, *both)]
