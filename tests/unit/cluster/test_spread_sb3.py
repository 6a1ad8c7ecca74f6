"""Environments of many workers for Stable-Baselines3: as in local processes; truncated when a worker is lost."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from tests.unit.cluster.workers_here import WorkersHere
from tests.unit.trainings.worker_environments import Counting

from jurybox.cluster.sb3_env import SpreadVecEnv, dealt
from jurybox.cluster.vector_env import EnvGroup
from jurybox.training.vector.worker import WorkerFailed


def made(*counts: int, **options):
    workers = WorkersHere([partial(EnvGroup, [partial(Counting, f"{w}", **options)] * n) for w, n in enumerate(counts)])
    return workers, SpreadVecEnv(workers, counts, seed=9)


def still(n: int) -> np.ndarray:
    return np.zeros((n, 1), np.float32)


def test_everything_reaches_every_environment_with_one_call_for_each_worker() -> None:
    workers, env = made(2, 1)
    env.seed(40)
    np.testing.assert_array_equal(env.reset(), [[40, 0], [41, 0], [42, 0]])
    workers.asked.clear()
    observations, rewards, dones, infos = env.step(still(3))
    assert workers.asked == [(0, "answer"), (1, "answer")]
    np.testing.assert_array_equal(observations, [[40, 1], [41, 1], [42, 1]])
    assert rewards.tolist() == [1, 1, 1] and not dones.any() and infos[2]["steps"] == 1
    assert env.get_attr("name") == ["0", "0", "1"]
    env.set_attr("name", "middle", indices=[1])
    assert env.get_attr("name") == ["0", "middle", "1"] and env.env_method("seen", indices=[2])[0].tolist() == [42, 1]
    env.step(still(3))
    observations, _, dones, infos = env.step(still(3))
    assert dones.all() and observations[0][1] == 0 and infos[0]["terminal_observation"][1] == 3
    env.close()


def test_an_environment_that_raises_ends_the_training_with_its_traceback() -> None:
    _, env = made(1, 1, fail_at=1)
    env.reset()
    with pytest.raises(WorkerFailed, match=r"environment 0: ValueError: the third wheel came off"):
        env.step(still(2))
    env.close()


@pytest.mark.parametrize("noticed_by", ["step", "get_attr"])
def test_the_episodes_of_a_worker_that_is_gone_are_cut(noticed_by) -> None:
    workers, env = made(2, 1)
    env.seed(40)
    env.reset()
    env.step(still(3))
    workers.die(0)
    if noticed_by == "get_attr":
        assert env.get_attr("name") == ["0", "0", "1"]
    observations, rewards, dones, infos = env.step(still(3))
    assert dones.tolist() == [True, True, False] and rewards.tolist() == [0, 0, 1]
    for index in (0, 1):
        assert infos[index]["restarted"] and infos[index]["TimeLimit.truncated"]
        assert infos[index]["terminal_observation"].tolist() == [40 + index, 1]
    assert observations[:, 1].tolist() == [0, 0, 2] and observations[0, 0] != observations[1, 0]
    assert env.step(still(3))[0][:, 1].tolist() == [1, 1, 0], "they go on"
    assert env.restarts == 1
    env.close()


def test_environments_are_dealt_out_in_order() -> None:
    assert dealt(5, 2) == [range(2), range(2, 4), range(4, 5)] and dealt(2, 4) == [range(2)]
    with pytest.raises(ValueError, match="at least one"):
        dealt(0, 2)
