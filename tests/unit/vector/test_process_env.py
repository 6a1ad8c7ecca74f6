"""Environments in worker processes behave as Gymnasium's own vector environments do."""

from __future__ import annotations

import os
import select
import signal
import threading
from contextlib import contextmanager
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tests.unit.vector.vector_environments import Counter, Nested, Reuses, Says

from jurybox.protocol.errors import Timeout
from jurybox.training.vector import ProcessVectorEnv
from jurybox.training.vector.sb3_env import WorkerVecEnv
from jurybox.training.vector.worker import WorkerFailed

N = 5
FIELDS = {"place": (np.int64, (2,))}


@pytest.fixture(scope="module", params=list(AutoresetMode), ids=lambda mode: mode.name)
def pair(request):
    make = [partial(Counter, name, length=3 + name % 2) for name in range(N)]
    with ProcessVectorEnv(make, workers=2, autoreset_mode=request.param, info_fields=FIELDS) as ours:
        yield ours, SyncVectorEnv(make, autoreset_mode=request.param)


def same(left, right) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            same(left[key], right[key])
    elif isinstance(left, np.ndarray) and left.dtype == object:
        for a, b in zip(left, right, strict=True):
            np.testing.assert_array_equal(a, b)
    else:
        np.testing.assert_array_equal(left, right)


def test_every_autoreset_mode_gives_what_gymnasiums_own_gives(pair) -> None:
    ours, theirs = pair
    for left, right in zip(ours.reset(seed=40), theirs.reset(seed=40), strict=True):
        same(left, right)
    assert ours.metadata["autoreset_mode"] is theirs.metadata["autoreset_mode"]
    over = np.zeros(N, bool)
    for step in range(12):
        if ours.autoreset_mode is AutoresetMode.DISABLED and over.any():
            found = [each.reset(options={"reset_mask": over.copy()}) for each in (ours, theirs)]
            for left, right in zip(*found, strict=True):
                same(left, right)
        mine, expected = (each.step(np.full(N, step % 3)) for each in pair)
        for left, right in zip(mine, expected, strict=True):
            same(left, right)
        over = mine[2] | mine[3]


def test_spaces_and_dtypes_are_gymnasiums(pair) -> None:
    ours, theirs = pair
    assert ours.observation_space == theirs.observation_space and ours.action_space == theirs.action_space
    observations, _ = ours.reset()
    assert ours.observation_space.contains(observations)
    step = ours.step(np.zeros(N, int))
    assert [part.dtype for part in step[1:4]] == [np.float64, np.bool_, np.bool_]


def test_returned_batches_are_not_overwritten(pair) -> None:
    ours, _ = pair
    before, _ = ours.reset(seed=1)
    kept = before.copy()
    ours.step(np.zeros(N, int))
    np.testing.assert_array_equal(before, kept)


def test_attributes_and_methods_reach_every_environment(pair) -> None:
    ours, _ = pair
    ours.reset()
    assert ours.get_attr("name") == tuple(range(N)) and len(set(ours.call("pid"))) == 2
    ours.set_attr("mark", [10, 11, 12, 13, 14])
    assert ours.get_attr("mark") == (10, 11, 12, 13, 14)
    assert set(ours.pids) == set(ours.call("pid"))


@pytest.fixture(scope="module")
def counters():
    with ProcessVectorEnv([partial(Counter, name) for name in range(3)], workers=2) as env:
        yield env


@pytest.fixture(scope="module")
def workers():
    """As Stable-Baselines3 wants them."""
    env = WorkerVecEnv([partial(Counter, name) for name in range(2)])
    yield env
    env.close()


def test_nested_spaces_and_lambdas_travel() -> None:
    with ProcessVectorEnv([lambda name=name: Nested() for name in range(3)], workers=1) as env:
        env.reset(seed=0)
        actions = {"a": np.array([[0.5, 0], [0.25, 0], [0, 1]], np.float32), "b": np.array([1, 2, 3])}
        observations, *_ = env.step(actions)
        np.testing.assert_array_equal(observations["a"], actions["a"])
        np.testing.assert_array_equal(observations["b"][0], [1, 2, 3])
        assert env.observation_space.contains(observations)


def test_the_first_that_are_ready_come_first() -> None:
    slow = [partial(Counter, name, length=50, slow=4.0 if name == 0 else 0.0) for name in range(3)]
    with ProcessVectorEnv(slow, workers=3, batch_size=2) as env:
        env.reset(seed=0)
        env.send(np.zeros(3, int))
        observations, rewards, _, _, infos = env.recv()
        assert sorted(infos["env_id"]) == [1, 2] and rewards.tolist() == [1.0] * 2
        assert observations[:, 0].tolist() == infos["env_id"].tolist()
        for _ in range(3):
            env.send(np.zeros(2, int), infos["env_id"])
            infos = env.recv()[4]
            assert 0 not in infos["env_id"]
        with pytest.raises(RuntimeError, match="have an action already"):
            env.send(np.zeros(1, int), [0])
        assert env.recv(1, timeout=30.0)[4]["env_id"].tolist() == [0]
        with pytest.raises(RuntimeError, match="send them first"):
            env.recv(1)


def test_an_early_recv_loses_nothing() -> None:
    with ProcessVectorEnv([partial(Counter, slow=1.0)]) as env:
        env.reset()
        env.send(np.zeros(1, int))
        with pytest.raises(Timeout, match="have not answered in time"):
            env.recv(timeout=0.01)
        assert env.recv(timeout=10.0)[1].tolist() == [1.0]


def test_a_reset_drops_steps_that_are_under_way(counters) -> None:
    counters.reset(seed=1)
    counters.send(np.zeros(3, int))
    observations, _ = counters.reset(seed=5)
    assert observations[:, 1].tolist() == [5, 6, 7] and observations[:, 3].tolist() == [0, 0, 0]
    assert counters.step(np.zeros(3, int))[1].tolist() == [1.0] * 3


def test_an_environments_exception_is_raised_here_with_its_traceback(counters) -> None:
    counters.reset()
    with pytest.raises(WorkerFailed, match=r"worker 1: ValueError: the third wheel came off[\s\S]*in step"):
        counters.step(np.array([0, 0, 8]))
    counters.reset(seed=2)
    assert counters.step(np.zeros(3, int))[1].tolist() == [1.0] * 3


@contextmanager
def interrupted_after(seconds: float):
    """A KeyboardInterrupt in the block, as Ctrl-C raises it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("error", [False, True])
def test_a_call_after_one_that_was_interrupted_gets_its_own_answer(counters, error) -> None:
    counters.reset(seed=1)
    for _ in range(2):
        with interrupted_after(0.2):
            counters.call("nap", 1.0, error)
    members = counters._pool._members
    assert [member.busy_since for member in members] == [None, None], "a later step has all its time"
    assert counters.get_attr("name") == (0, 1, 2)
    with interrupted_after(0.2):
        counters.call("nap", 1.0, error)
    assert counters.step(np.zeros(3, int))[1].tolist() == [1.0] * 3
    assert counters.call("nap", 0.0) == ("slept",) * 3
    assert counters._pool.restarts == 0


@pytest.mark.parametrize("side", [pytest.param("send_bytes", marks=pytest.mark.runs), "recv_bytes"])
def test_a_worker_with_whom_a_message_was_interrupted_is_replaced(monkeypatch, side) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt  # with some of its bytes on their way

    with ProcessVectorEnv([Counter]) as env:
        env.reset(seed=1)
        with monkeypatch.context() as patch:
            patch.setattr(type(env._pool._members[0].pipe), side, interrupt)
            with pytest.raises(KeyboardInterrupt):
                env.get_attr("name")
        with pytest.raises(WorkerFailed, match="it was replaced"):
            env.get_attr("name")
        assert env.get_attr("name") == (0,) and env._pool.restarts == 1


@pytest.mark.parametrize("error", [False, True])
def test_a_call_of_stable_baselines_workers_after_one_that_was_interrupted_gets_its_own_answer(workers, error) -> None:
    workers.reset()
    with interrupted_after(0.2):
        workers.env_method("nap", 1.0, error)
    assert workers.get_attr("name") == [0, 1]
    with interrupted_after(0.2):
        workers.env_method("nap", 1.0, error)
    assert workers.step([0, 0])[1].tolist() == [1.0] * 2


def test_environments_that_cannot_be_created_or_differ_are_errors() -> None:
    with pytest.raises(WorkerFailed, match="unexpected keyword"):
        ProcessVectorEnv([partial(Counter, colour="red")])
    with pytest.raises(ValueError, match="same spaces everywhere"):
        ProcessVectorEnv([Counter, Nested], workers=2)
    with pytest.raises(ValueError, match="batch_size"):
        ProcessVectorEnv([Counter], batch_size=2)


def test_it_runs_a_registered_environment() -> None:
    with ProcessVectorEnv([partial(gymnasium.make, "CartPole-v1")] * 2) as env:
        env.reset(seed=0)
        for _ in range(30):
            observations, *_ = env.step(np.ones(2, int))
        assert observations.shape == (2, 4)


def in_a_forked_child(work) -> bytes:
    """What `work` gives there, as text; bounded in time by the pipe's end."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = str(work())
        except BaseException as error:  # noqa: BLE001 (reported to the parent)
            said = f"{type(error).__name__}: {error}"
        os.write(theirs, said.encode())
        os._exit(0)
    os.close(theirs)
    try:
        with os.fdopen(ours, "rb") as pipe:
            assert select.select([pipe], [], [], 20.0)[0], "the child hangs"
            return pipe.read()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_receives_none_of_its_parents_answers(counters) -> None:
    counters.reset(seed=1)
    refused = in_a_forked_child(lambda: counters.step(np.zeros(3, int)))
    assert b"Refused: these environments belong to process" in refused
    assert in_a_forked_child(counters.close) == b"None", "its copy alone is closed"
    assert counters.step(np.zeros(3, int))[1].tolist() == [1.0] * 3


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_refused_by_stable_baselines_workers_too(workers) -> None:
    workers.reset()
    assert b"WorkerFailed: worker 0 belongs to process" in in_a_forked_child(workers.reset)
    assert in_a_forked_child(workers.close) == b"None"
    assert workers.step([0, 1])[1].tolist() == [1.0] * 2


SAID = [
    ({"b": 300}, r"an observation\['b'\] holds 300: expected int8 of shape \(\)"),
    ({"b": 1.5}, r"\['b'\] holds 1.5"),
    ({"a": None}, r"\['a'\] is a NoneType, None: expected float32 of shape \(2,\)"),
    ({"a": np.zeros(3)}, r"\['a'\] has the shape \(3,\)"),
    ({"a": 0.5}, r"\['a'\] has the shape \(\)"),
    ({"a": np.array([1e39, 0])}, r"\['a'\] holds a number beyond float32"),
    ({"b": KeyError}, "an observation is a dict, .*: expected the parts a, b"),
    ({"reward": None}, "the reward is a NoneType, None: expected one number"),
    ({"reward": [1.0]}, r"the reward is a list, \[1.0\]: expected one number"),
    ({"terminated": None}, "terminated is a NoneType, None: expected True or False"),
    ({"place": (1.5, 2)}, r"info\['place'\] holds 1.5: expected int64"),
    ({"info": None}, "the info of a step is a NoneType, None: expected a dict"),
]


def test_what_an_environment_may_not_return_is_refused_with_its_part() -> None:
    with ProcessVectorEnv([Says], info_fields=FIELDS) as env:
        right = env.get_attr("said")[0]
        for said, told in SAID:
            env.set_attr("said", {**right, **said})
            env.reset()
            with pytest.raises(WorkerFailed, match=told):
                env.step(np.zeros((1, 2)))


def test_actions_are_neither_broadcast_nor_cut_off() -> None:
    with ProcessVectorEnv([Says, Says], workers=1) as env, ProcessVectorEnv([Counter] * 2, workers=1) as counters:
        env.reset()
        counters.reset()
        for wrong in (np.zeros(2), np.zeros((1, 2)), 0.5, [[0, 0], [None, 0]], np.zeros((2, 3))):
            with pytest.raises(ValueError, match="the batch of actions"):
                env.step(wrong)
        for wrong in (np.array([0.5, 1.0]), [0], np.zeros((2, 1), int), None):
            with pytest.raises(ValueError, match="the batch of actions"):
                counters.step(wrong)
        env.step(np.zeros((2, 2)))  # as float64: rounded, not refused
        counters.step(np.array([1.0, 2.0]).astype(np.int32))


def test_an_environment_that_reuses_its_arrays_ends_with_its_last_ones() -> None:
    with ProcessVectorEnv([Reuses], autoreset_mode=AutoresetMode.SAME_STEP) as env:
        env.reset()
        seen, *_, info = env.step(np.zeros(1, int))
        assert (info["final_obs"][0].item(), info["final_info"]["told"].item(), seen.item()) == (2, 2, -1)
    workers = WorkerVecEnv([lambda kind=Reuses: kind()])  # a lambda, which pickle refuses
    try:
        workers.reset()
        seen, _, _, (info,) = workers.step([0])
        assert (info["terminal_observation"].item(), info["told"].item(), seen.item()) == (2, 2, -1)
    finally:
        workers.close()
