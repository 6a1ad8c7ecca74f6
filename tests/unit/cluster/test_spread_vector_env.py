"""Environments of many workers behave as one VectorEnv, and as the same environments on one machine."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tests.unit.cluster.workers_here import WorkersHere
from tests.unit.vector.vector_environments import Counter, Nested

from jurybox.cluster.vector_env import SpreadVectorEnv, WorkerGroups, joined
from jurybox.studies.workflow import environments
from jurybox.studies.workflow.cage import CageRows, CageVectorEnv
from jurybox.studies.workflow.rollouts import play
from jurybox.studies.workflow.settings import WorkflowTraining


def counters(*counts: int, groups: int = 1) -> tuple[WorkersHere, list[SpreadVectorEnv]]:
    """Workers with so many counting environments in every group."""
    makers, name = [], 0
    for count in counts:
        own = [partial(SyncVectorEnv, [partial(Counter, name + i) for i in range(count)])] * groups
        makers.append(partial(WorkerGroups, own))
        name += count
    workers = WorkersHere(makers)
    return workers, [SpreadVectorEnv(workers, group, counts) for group in range(groups)]


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


def test_groups_of_workers_behave_like_all_environments_in_one_process() -> None:
    _, (spread,) = counters(2, 1, 2)
    together = SyncVectorEnv([partial(Counter, i) for i in range(5)])
    same(spread.reset(seed=40), together.reset(seed=40))
    for _ in range(5):  # over the end of an episode and the reset after it
        same(spread.step(np.zeros(5, np.int64)), together.step(np.zeros(5, np.int64)))
    assert spread.single_observation_space == together.single_observation_space
    assert spread.observation_space == together.observation_space


def test_nested_observations_are_joined() -> None:
    makers = [partial(WorkerGroups, [partial(SyncVectorEnv, [Nested] * n)]) for n in (1, 2)]
    spread, together = SpreadVectorEnv(WorkersHere(makers), 0, (1, 2)), SyncVectorEnv([Nested] * 3)
    same(spread.reset(seed=1), together.reset(seed=1))


def test_the_rows_of_a_worker_that_is_gone_are_cut_and_begin_anew() -> None:
    workers, (env,) = counters(2, 1)
    env.reset(seed=40)
    before = env.step(np.zeros(3, np.int64))[0]
    env.step_async(np.zeros(3, np.int64))
    workers.die(0)
    observations, rewards, terminated, truncated, infos = env.step_wait()
    assert truncated.tolist() == [True, True, False] and not terminated.any()
    assert infos["restarted"].tolist() == infos["_restarted"].tolist() == [True, True, False]
    np.testing.assert_array_equal(observations[:2], before[:2])
    assert rewards.tolist() == [0, 0, 2] and not infos["_place"][:2].any() and infos["_place"][2]
    observations, rewards, _, truncated, infos = env.step(np.zeros(3, np.int64))
    assert rewards.tolist() == [0, 0, 3] and not truncated.any() and "restarted" not in infos
    assert observations[:, 3].tolist() == [0, 0, 3], "the first rows' step was the reset"
    assert observations[0, 1] not in (40, -1) and observations[1, 1] == observations[0, 1] + 1, "seeds of their own"
    assert env.step(np.zeros(3, np.int64))[1].tolist() == [1, 1, 0], "the third row ended its episode"
    assert workers.restarts == 1


def test_both_halves_notice_a_worker_that_is_gone() -> None:
    workers, (one, other) = counters(1, 1, groups=2)
    for env in (one, other):
        env.reset(seed=3)
        env.step_async(np.zeros(2, np.int64))
    workers.die(1)
    assert one.step_wait()[3].tolist() == [False, True]
    one.step_async(np.zeros(2, np.int64))
    assert other.step_wait()[3].tolist() == [False, True], "its step went down with the same worker"
    assert one.step_wait()[0][:, 3].tolist() == [2, 0]
    assert workers.restarts == 1


@pytest.mark.parametrize("moment", ["idle", "in a reset"])
def test_a_worker_that_dies_between_episodes_costs_none(moment) -> None:
    workers, (env,) = counters(1, 1)
    env.reset(seed=3)
    workers.die(0)
    if moment == "idle":
        assert env.call("num_envs") == (1, 1), "the new one answers"
    observations, _ = env.reset()
    assert observations[:, 3].tolist() == [0, 0] and observations[0, 1] > 0, "seeded anew"
    assert not env.step(np.zeros(2, np.int64))[3].any()


def test_an_idle_workers_death_is_reported_at_the_next_step() -> None:
    workers, (env,) = counters(1, 1)
    env.reset(seed=3)
    workers.die(0)
    env.call("num_envs")
    workers.asked.clear()
    assert env.step(np.zeros(2, np.int64))[3].tolist() == [True, False]
    assert workers.asked == [(1, "step"), (0, "reset")], "no step of an episode that never began"


def test_infos_that_only_some_groups_set_are_zero_elsewhere() -> None:
    rows = [slice(0, 1), slice(1, 3)]
    told = [{"a": np.array([1.5]), "_a": np.array([True])}, {"b": np.array(["x", None], object)}]
    found = joined(told, rows)
    assert found["a"].tolist() == [1.5, 0, 0] and found["_a"].tolist() == [True, False, False]
    assert found["b"].tolist() == [None, "x", None]


@pytest.mark.parametrize("counts", [(12,), (5, 7), (1, 4, 4, 3)])
def test_networks_are_the_same_however_they_are_shared_out(counts) -> None:
    whole = CageVectorEnv(12, "Meander", episode_length=6, autoreset_mode="Disabled")
    firsts = np.cumsum([0, *counts])[:-1].tolist()
    makers = [
        partial(CageRows, count, "Meander", first=first, of=12, episode_length=6, autoreset_mode="Disabled")
        for first, count in zip(firsts, counts, strict=True)
    ]
    spread = SpreadVectorEnv(WorkersHere([partial(WorkerGroups, [make]) for make in makers]), 0, counts)
    assert spread.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    same(spread.reset(seed=5), whole.reset(seed=5))
    random = np.random.default_rng(0)
    for _ in range(2):
        for _ in range(6):
            actions = random.integers(0, 145, 12)
            same(spread.step(actions), whole.step(actions))
        same(spread.reset(), whole.reset())
    assert spread.call("random_state")[0] == whole.networks.random.bit_generator.state


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
    halves = [SpreadVectorEnv(workers, group, (2,)) for group in range(2)]
    said = workers.asked
    policy = Scripted()
    act = policy.act
    policy.act = lambda *a, **k: (said.append((0, "act")), act(*a, **k))[1]
    play(halves, policy, None, steps=2, weight=0.0)
    assert [what for _, what in said if what != "reset"] == [*("spaces", "spaces"), *("act", "step") * 4, "act"]
