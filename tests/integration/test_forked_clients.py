"""A client used before a fork and after it: parent and children get their own answers, over every transport."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback

import gymnasium
import numpy as np
import pytest
from tests.serving import wait_until

from jurybox.client import Refused

ROW = np.arange(4, dtype=np.float32)


@pytest.fixture
def forkable(transport):
    if transport == "grpc":
        pytest.skip("gRPC does not survive a fork: such a child is refused")


def in_child(work, timeout: float = 60.0) -> str:
    """What `work` says, or how it fails, in a forked child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = str(work())
        except BaseException:  # noqa: BLE001  it is told
            said = traceback.format_exc()
        os.write(writer, said.encode()[:60_000])
        os._exit(0)
    os.close(writer)
    said, until = b"", time.monotonic() + timeout
    os.set_blocking(reader, False)
    while True:
        try:
            part = os.read(reader, 65_536)
        except BlockingIOError:
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise AssertionError("the child hangs") from None
            time.sleep(0.005)
            continue
        if not part:
            break
        said += part
    os.close(reader)
    os.waitpid(pid, 0)
    return said.decode()


def right(model, seed: int, times: int = 60) -> str:
    """Ask for different rows in every way; says what is wrong."""
    rng = np.random.default_rng(seed)
    for turn in range(times):
        x = rng.standard_normal((1 + turn % 4, 4)).astype(np.float32)
        for way, answer in (
            ("call", model(x[0])[None]),
            ("infer", model.infer(x)),
            ("submit", model.submit(x).result().outputs),
        ):
            if not np.array_equal(answer, 2 * x[: len(answer)] + 1):
                return f"wrong by {way}"
        with model.rows(2) as rows:
            rows.inputs["observation"][:] = x[0]
            rows.infer()
            if not np.array_equal(rows.outputs["action"][1], 2 * x[0] + 1):
                return "wrong by rows"
    return "right"


def test_parent_and_children_ask_at_once_and_each_gets_its_own_answers(forkable, client):
    model = client.model("affine", rows=8)
    assert right(model, 0, 3) == "right"
    told, stop = [], threading.Event()

    def parent():
        while not stop.is_set():
            told.append(right(model, 1, 5))

    asking = threading.Thread(target=parent)
    asking.start()  # so that the fork finds it in the midst of a call, with the model's lock held
    try:
        children = [in_child(lambda seed=seed: right(model, seed)) for seed in range(2, 5)]
    finally:
        stop.set()
        asking.join()
    assert children == ["right"] * 3
    assert set(told) == {"right"}


class Asking(gymnasium.Env):
    """An environment whose reward is what the model, made before the fork, says of its observation."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)

    def __init__(self, model) -> None:
        self.model = model

    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32), {}

    def step(self, action):
        x = np.asarray(action, np.float32)
        return x, float(self.model(x).sum()), False, False, {}


_of_the_module = []


def asking_the_modules():
    return Asking(_of_the_module[0])


def rewards_of(actions):
    return (2 * actions + 1).sum(axis=1)


def test_gymnasiums_async_vector_env_forks_and_every_reward_is_right(forkable, client):
    model = client.model("affine", rows=4)
    model(ROW)
    rng = np.random.default_rng(3)
    envs = gymnasium.vector.AsyncVectorEnv([lambda: Asking(model)] * 3, context="fork")
    try:
        envs.reset()
        for _ in range(20):
            actions = rng.uniform(-1, 1, (3, 4)).astype(np.float32)
            envs.step_async(actions)
            np.testing.assert_array_equal(model(ROW), 2 * ROW + 1)  # the parent asks meanwhile
            np.testing.assert_allclose(envs.step_wait(timeout=60)[1], rewards_of(actions), rtol=1e-5)
    finally:
        envs.close()


def test_stable_baselines_subprocesses_fork_and_every_reward_is_right(forkable, client):
    from stable_baselines3.common.vec_env import SubprocVecEnv

    _of_the_module.append(client.model("affine", rows=4))  # as in a script: what is forked finds it there
    rng = np.random.default_rng(4)
    envs = SubprocVecEnv([asking_the_modules] * 3, start_method="fork")
    try:
        envs.reset()
        for _ in range(20):
            actions = rng.uniform(-1, 1, (3, 4)).astype(np.float32)
            envs.step_async(actions)
            np.testing.assert_array_equal(_of_the_module[0](ROW), 2 * ROW + 1)
            np.testing.assert_allclose(envs.step_wait()[1], rewards_of(actions), rtol=1e-5)
    finally:
        envs.close()
        _of_the_module.clear()


def test_what_was_in_flight_at_the_fork_is_the_parents(forkable, client):
    model = client.model("affine", rows=8)
    x = np.ones((2, 4), np.float32)
    ticket, answered = model.submit(x), model.submit(2 * x)
    wait_until(answered.done)
    with model.rows(2) as rows:

        def child():
            for what in (ticket.result, answered.result, rows.infer):
                try:
                    what()
                except Refused as error:
                    assert "fork" in str(error)
                else:
                    return f"{what} gave something"
            return right(model, 5, 5)

        assert in_child(child) == "right"
        rows.inputs["observation"][:] = x
        rows.infer()
        np.testing.assert_array_equal(rows.outputs["action"], 2 * x + 1)
    np.testing.assert_array_equal(ticket.result().outputs, 2 * x + 1)
    np.testing.assert_array_equal(answered.result().outputs, 4 * x + 1)


def test_a_child_that_lives_on_does_not_keep_its_parents_lanes(forkable, leased, server, connecting):
    """The lock of a lane ends with the last descriptor of it: a child must have none."""
    reader, writer = os.pipe()
    wait_until(lambda: lanes(server) == 0, 30, "an empty house")
    middle = os.fork()
    if middle == 0:
        model = connecting().model("affine", rows=8)
        model(ROW)
        if os.fork() == 0:
            os.close(writer)
            os.read(reader, 1)  # until the test ends
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(middle, 0)
    try:
        wait_until(lambda: lanes(server) == 0, 30, "the dead parent's lane is free, though its child lives")
    finally:
        os.close(writer)
        os.close(reader)


def lanes(server) -> int:
    with server.connect() as client:
        return client.status()["lanes"]["in_use"]


def test_what_a_child_closes_stays_open_for_its_parent(forkable, connecting):
    with connecting() as connection:
        model = connection.model("affine", rows=4)
        model(ROW)

        def child():
            model.close()
            connection.close()
            return "closed"

        assert in_child(child) == "closed"
        assert right(model, 6, 5) == "right"


def test_a_child_of_a_child_gets_its_own_answers_too(forkable, client):
    model = client.model("affine", rows=8)
    model(ROW)
    assert in_child(lambda: [right(model, 7, 5), in_child(lambda: right(model, 8, 5)), right(model, 9, 5)]) == str(
        ["right"] * 3
    )


def test_a_connection_without_a_model_works_in_a_child(forkable, client):
    assert in_child(lambda: right(client.model("affine", rows=8), 10, 5)) == "right"
    assert client.models()


@pytest.mark.parametrize("transport", ["grpc"])
def test_over_grpc_a_child_is_refused_and_told_what_to_do(client):
    model = client.model("affine", rows=4)
    model(ROW)

    def child():
        from jurybox.client import connect

        said = []
        for what in (
            lambda: model(ROW),
            lambda: model.infer(ROW[None]),
            client.models,
            lambda: client.model("affine"),
            lambda: connect(client.address),
        ):
            try:
                what()
            except Refused as error:
                said.append("gRPC cannot be used" in str(error))
        client.close()
        return said

    assert in_child(child) == str([True] * 5)
    assert right(model, 11, 5) == "right"
