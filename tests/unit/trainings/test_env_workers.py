import os
import signal
import socket
import time
from functools import partial

import numpy as np
import psutil
import pytest
from tests.unit.trainings.worker_environments import Counting, WithOpenCV, broken
from tests.unit.vector.vector_environments import Counter

from jurybox.processes import set_timeouts
from jurybox.training.vector.sb3_env import WorkerVecEnv
from jurybox.training.vector.worker import WorkerFailed


@pytest.fixture(scope="module")
def workers():
    made = WorkerVecEnv([partial(Counting, "left"), partial(Counting, "right")])
    yield made
    made.close()


@pytest.fixture
def own_workers():
    made = WorkerVecEnv([Counting, Counting])
    yield made
    made.close()


def actions(*values):
    return np.array(values, dtype=np.float32)[:, None]


def test_steps_resets_attributes_and_methods_reach_every_environment(workers):
    workers.seed(40)
    np.testing.assert_array_equal(workers.reset(), [[40, 0], [41, 0]])
    observations, rewards, dones, infos = workers.step(actions(0, 0))
    np.testing.assert_array_equal(observations, [[40, 1], [41, 1]])
    assert rewards.tolist() == [1, 1] and not dones.any() and infos[1]["steps"] == 1
    assert workers.get_attr("name") == ["left", "right"]
    workers.set_attr("name", "middle", indices=[1])
    assert workers.get_attr("name") == ["left", "middle"]
    workers.set_attr("name", "right", indices=[1])
    assert workers.env_method("seen", indices=[0])[0].tolist() == [40, 1]


def test_an_episode_that_ends_begins_anew_and_keeps_its_last_observation(workers):
    workers.reset()
    for _ in range(3):
        observations, _, dones, infos = workers.step(actions(0, 0))
    assert dones.all() and observations[0][1] == 0
    assert infos[0]["terminal_observation"][1] == 3 and infos[0]["TimeLimit.truncated"] is False


def test_a_worker_has_no_torch_one_thread_and_no_ear_for_ctrl_c():
    workers = WorkerVecEnv([WithOpenCV])
    try:
        about = workers.env_method("about_the_process")[0]
    finally:
        workers.close()
    assert about["torch"] is False
    assert about["limits"] == {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    assert about["opencv_threads"] == 1
    assert about["interrupt_ignored"] is True


def test_ctrl_c_in_the_terminal_leaves_workers_to_the_learner(workers):
    for process in workers.processes:
        process.send_signal(signal.SIGINT)
    workers.reset()
    workers.step(actions(0, 0))
    assert all(process.poll() is None for process in workers.processes)


@pytest.mark.runs
def test_an_environments_exception_is_raised_here_with_its_traceback():
    workers = WorkerVecEnv([Counting, partial(Counting, fail_at=2)])
    try:
        workers.reset()
        workers.step(actions(0, 0))
        with pytest.raises(WorkerFailed, match=r"worker 1: ValueError: the third wheel came off[\s\S]*in step"):
            workers.step(actions(0, 0))
    finally:
        workers.close()


@pytest.mark.runs
def test_an_environment_that_cannot_be_created_is_an_error_and_no_worker_is_left():
    before = psutil.Process().children()
    with pytest.raises(WorkerFailed, match="no such camera"):
        WorkerVecEnv([Counting, broken])
    assert psutil.Process().children() == before


def test_a_worker_that_dies_is_named_with_its_exit_status(own_workers):
    own_workers.reset()
    with pytest.raises(WorkerFailed, match=r"worker 1 \(process \d+\) ended; exit status 7"):
        own_workers.step(actions(0, -1))


def test_closing_ends_workers_in_the_middle_of_a_step_and_twice_is_no_error(own_workers):
    own_workers.reset()
    own_workers.step_async(actions(0, 0))
    own_workers.close()
    own_workers.close()
    assert all(process.poll() is not None for process in own_workers.processes)


def test_an_environment_that_hangs_is_an_error_after_a_time_out() -> None:
    env = WorkerVecEnv([partial(Counter, slow=30.0)], timeout=60.0)
    pids = [process.pid for process in env.processes]
    try:
        env.reset()
        for remote in env.remotes:
            with socket.socket(fileno=os.dup(remote.member.pipe.fileno())) as end:
                set_timeouts(end, 1.5)
        began = time.monotonic()
        with pytest.raises(WorkerFailed, match=rf"worker 0 \(process {pids[0]}\) has not answered for 60 s"):
            env.step([0])
        assert time.monotonic() - began < 25
    finally:
        env.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
