"""A worker process with environments dies, hangs, or outlives its learner."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from gymnasium.vector import AutoresetMode
from tests.serving import wait_until
from tests.unit.vector.vector_environments import Counter

from jurybox.protocol.segment import directory
from jurybox.training.vector import ProcessVectorEnv
from jurybox.training.vector.worker import WorkerFailed

N = 4
NOTHING = np.zeros(N, int)


def vector(mode: AutoresetMode = AutoresetMode.NEXT_STEP, **settings) -> ProcessVectorEnv:
    make = [partial(Counter, name, length=100) for name in range(N)]
    return ProcessVectorEnv(make, workers=2, autoreset_mode=mode, **settings)


@pytest.fixture(scope="module")
def shared():
    with vector() as env:
        yield env


@pytest.fixture
def env(shared) -> ProcessVectorEnv:
    shared.reset(seed=3)
    return shared


def test_a_killed_worker_is_replaced_and_its_environments_begin_anew(env) -> None:
    before = env.step(NOTHING)[0]
    os.kill(env.pids[0], signal.SIGKILL)
    observations, rewards, terminated, truncated, infos = env.step(NOTHING)
    assert truncated.tolist() == infos["restarted"].tolist() == [True, True, False, False]
    assert not terminated.any() and rewards.tolist() == [0, 0, 2, 2]
    np.testing.assert_array_equal(observations[:2], before[:2], "the last that was seen of them")
    observations, rewards, _, truncated, infos = env.step(NOTHING)
    assert observations[:, 3].tolist() == [0, 0, 3, 3] and not truncated.any() and "restarted" not in infos
    assert env.step(NOTHING)[1].tolist() == [1, 1, 4, 4]


@pytest.mark.timeout(120)
def test_programs_that_environments_have_started_hide_no_death() -> None:
    with vector(timeout=600.0) as env:
        env.reset(seed=3)
        helpers = env.call("helper")
        try:
            os.kill(env.pids[0], signal.SIGKILL)
            assert env.step(NOTHING)[3].tolist() == [True, True, False, False]
        finally:
            for helper in helpers:
                os.kill(helper, signal.SIGKILL)


def test_in_same_step_mode_the_new_episode_is_there_at_once() -> None:
    with vector(AutoresetMode.SAME_STEP) as env:
        env.reset(seed=3)
        before = env.step(NOTHING)[0]
        observations, _, _, truncated, infos = env.step(np.array([0, 9, 0, 0]))
        assert truncated.tolist() == infos["restarted"].tolist() == [True, True, False, False]
        assert observations[:, 3].tolist() == [0, 0, 2, 2]
        np.testing.assert_array_equal(infos["final_obs"][1], before[1])
        fresh = [np.random.SeedSequence((3, number, 1)).generate_state(1)[0] for number in (0, 1)]
        assert env.get_attr("np_random_seed") == (*fresh, 5, 6), "of the run's seed, the environment and the death"
        assert env.step(NOTHING)[1].tolist() == [1, 1, 3, 3]


def test_without_autoreset_the_learner_resets_them() -> None:
    with vector(AutoresetMode.DISABLED) as env:
        env.reset(seed=3)
        truncated = env.step(np.array([9, 0, 0, 0]))[3]
        assert truncated.tolist() == [True, True, False, False]
        env.reset(options={"reset_mask": truncated})
        assert env.step(NOTHING)[1].tolist() == [1, 1, 2, 2]


def test_idle_environments_of_a_worker_that_died_report_it_at_their_next_action(env) -> None:
    env.send(np.array([9]), [0])
    infos = env.recv(1)[4]
    assert infos["env_id"].tolist() == [0] and infos["restarted"].all()
    env.send(np.array([0]), [1])
    _, _, _, truncated, infos = env.recv(1)
    assert infos["env_id"].tolist() == [1] and truncated.all() and infos["restarted"].all()
    env.send(np.array([0, 0]), [0, 1])
    assert not env.recv(2)[3].any()


def test_a_worker_that_hangs_is_replaced_after_the_time_out() -> None:
    with vector(timeout=6.0) as env:
        env.reset(seed=3)
        _, _, _, truncated, infos = env.step(np.array([0, 0, 0, 7]))
        assert truncated.tolist() == infos["restarted"].tolist() == [False, False, True, True]
        assert env.step(NOTHING)[1].tolist() == [2, 2, 0, 0]


def test_a_worker_killed_before_a_reset_is_replaced_by_it(env) -> None:
    for pid in env.pids:
        os.kill(pid, signal.SIGKILL)
    observations, _ = env.reset(seed=8)
    assert observations[:, 1].tolist() == [8, 9, 10, 11]


class DiesAtOnce(Counter):
    def reset(self, *, seed=None, options=None):
        os._exit(3)


def test_a_worker_that_only_ever_dies_is_given_up() -> None:
    with ProcessVectorEnv([DiesAtOnce]) as env, pytest.raises(WorkerFailed, match="3 times in a row"):
        env.reset()


LEARNER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from tests.unit.vector.vector_environments import Counter
from jurybox.training.vector import ProcessVectorEnv
env = ProcessVectorEnv([Counter] * 2, workers=2)
env.reset()
env.send([0, 7])  # one waits for an action, the other is in a step
print(*env.pids, flush=True)
time.sleep(60)
"""


def test_workers_and_memory_go_with_a_killed_learner() -> None:
    root = os.fspath(directory())
    before = set(os.listdir(root))
    learner = subprocess.Popen([sys.executable, "-c", LEARNER, str(Path.cwd())], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in learner.stdout.readline().split()]
    assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
    learner.kill()
    learner.wait()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 30.0)
    wait_until(lambda: not [name for name in set(os.listdir(root)) - before if "vector" in name], 10.0, "its memory")


def shared_memory() -> set[str]:
    """The segments without a file, as the environments' are, that this process has open or mapped."""
    places = [*Path("/proc/self/maps").read_text().splitlines()]
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this very listing
            places.append(str(each.readlink()))
    return {found[0] for place in places if (found := re.search(rf"{directory()}/\S+ \(deleted\)", place))}


def test_closing_leaves_neither_workers_nor_memory() -> None:
    before = shared_memory()
    env = vector()
    pids = env.pids
    assert all(psutil.pid_exists(pid) for pid in pids) and len(shared_memory() - before) == 1
    env.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert shared_memory() == before


def seeds(env: ProcessVectorEnv, seed: int, *all_dying: int) -> list[tuple[int, ...]]:
    """Seeds of all environments after each death of a worker, in a run in which these end theirs."""
    env.reset(seed=seed)
    seen = []
    for dying in all_dying:
        actions = NOTHING.copy()
        actions[dying] = 9
        truncated = env.step(actions)[3]
        assert truncated.sum() == 2
        if env.autoreset_mode is AutoresetMode.DISABLED:
            env.reset(options={"reset_mask": truncated})
        env.step(NOTHING)
        seen.append(env.get_attr("np_random_seed"))
    return seen


@pytest.mark.runs
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_a_run_is_the_same_again_though_its_workers_died_and_no_two_environments_are_alike(mode) -> None:
    with vector(mode) as env:
        first, again, other = seeds(env, 3, 1, 2, 0), seeds(env, 3, 1, 2, 0), seeds(env, 7, 1)
    assert first == again
    replaced = {seed for moment in first for seed in moment} - {3, 4, 5, 6}
    # Environments 0 and 1 were replaced twice, 2 and 3 once: each time with a seed of its own.
    assert len(replaced) == 6 and len(set(first[-1])) == N
    assert not replaced & {seed for moment in other for seed in moment}


def test_environments_replaced_during_a_call_report_it_at_their_next_action(env) -> None:
    os.kill(env.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerFailed, match="it was replaced"):
        env.get_attr("name")
    truncated = env.step(NOTHING)[3]
    assert truncated.tolist() == [True, True, False, False]
    assert env.step(NOTHING)[0][:, 3].tolist() == [0, 0, 2, 2]
