"""A client used before a fork and after it: parent and children get their own answers, over every transport."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from pathlib import Path

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
    """Return the result of `work`, or its traceback, from a forked child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(work())
        except BaseException:  # noqa: BLE001  the parent gets it
            text = traceback.format_exc()
        os.write(writer, text.encode()[:60_000])
        os._exit(0)
    os.close(writer)
    text, deadline = b"", time.monotonic() + timeout
    os.set_blocking(reader, False)
    while True:
        try:
            part = os.read(reader, 65_536)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise AssertionError("the child hangs") from None
            time.sleep(0.005)
            continue
        if not part:
            break
        text += part
    os.close(reader)
    os.waitpid(pid, 0)
    return text.decode()


def check_answers(model, seed: int, times: int = 60) -> str:
    """Send different rows by every kind of call; return what is wrong, or "right"."""
    rng = np.random.default_rng(seed)
    for turn in range(times):
        x = rng.standard_normal((1 + turn % 4, 4)).astype(np.float32)
        for call_name, answer in (
            ("call", model(x[0])[None]),
            ("infer", model.infer(x)),
            ("submit", model.submit(x).result().outputs),
        ):
            if not np.array_equal(answer, 2 * x[: len(answer)] + 1):
                return f"wrong by {call_name}"
        with model.rows(2) as rows:
            rows.inputs["observation"][:] = x[0]
            rows.infer()
            if not np.array_equal(rows.outputs["action"][1], 2 * x[0] + 1):
                return "wrong by rows"
    return "right"


def test_a_child_has_none_of_its_parents_rows_and_rings_mapped(forkable, client):
    def mapped() -> list[str]:
        with Path("/proc/self/maps").open() as lines:
            names = [line.split(maxsplit=5)[-1] for line in lines if "jurybox-" in line]
        return [name for name in names if "-arena-" in name or "-rings-" in name]

    model = client.model("affine", rows=8)
    model.infer(ROW[None])
    before = mapped()
    assert in_child(mapped) == "[]", before


def test_parent_and_children_send_concurrently_and_get_their_own_answers(forkable, client):
    model = client.model("affine", rows=8)
    assert check_answers(model, 0, 3) == "right"
    results, stop = [], threading.Event()

    def parent():
        while not stop.is_set():
            results.append(check_answers(model, 1, 5))

    thread = threading.Thread(target=parent)
    thread.start()  # so that forks happen during its calls, with the model's lock held
    try:
        children = [in_child(lambda seed=seed: check_answers(model, seed)) for seed in range(2, 5)]
    finally:
        stop.set()
        thread.join()
    assert children == ["right"] * 3
    assert set(results) == {"right"}


class AskingEnv(gymnasium.Env):
    """An environment whose reward is the answer of a model made before the fork."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)

    def __init__(self, model) -> None:
        self.model = model

    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32), {}

    def step(self, action):
        x = np.asarray(action, np.float32)
        return x, float(self.model(x).sum()), False, False, {}


_module_models = []


def env_of_module_model():
    return AskingEnv(_module_models[0])


def rewards_of(actions):
    return (2 * actions + 1).sum(axis=1)


def test_gymnasiums_async_vector_env_forks_and_every_reward_is_right(forkable, client):
    model = client.model("affine", rows=4)
    model(ROW)
    rng = np.random.default_rng(3)
    envs = gymnasium.vector.AsyncVectorEnv([lambda: AskingEnv(model)] * 3, context="fork")
    try:
        envs.reset()
        for _ in range(20):
            actions = rng.uniform(-1, 1, (3, 4)).astype(np.float32)
            envs.step_async(actions)
            np.testing.assert_array_equal(model(ROW), 2 * ROW + 1)  # the parent uses the model meanwhile
            np.testing.assert_allclose(envs.step_wait(timeout=60)[1], rewards_of(actions), rtol=1e-5)
    finally:
        envs.close()


def test_stable_baselines_subprocesses_fork_and_every_reward_is_right(forkable, client):
    from stable_baselines3.common.vec_env import SubprocVecEnv

    _module_models.append(client.model("affine", rows=4))  # as in a script: forked processes find it there
    rng = np.random.default_rng(4)
    envs = SubprocVecEnv([env_of_module_model] * 3, start_method="fork")
    try:
        envs.reset()
        for _ in range(20):
            actions = rng.uniform(-1, 1, (3, 4)).astype(np.float32)
            envs.step_async(actions)
            np.testing.assert_array_equal(_module_models[0](ROW), 2 * ROW + 1)
            np.testing.assert_allclose(envs.step_wait()[1], rewards_of(actions), rtol=1e-5)
    finally:
        envs.close()
        _module_models.clear()


def test_requests_in_flight_at_the_fork_belong_to_the_parent(forkable, client):
    model = client.model("affine", rows=8)
    x = np.ones((2, 4), np.float32)
    ticket, answered = model.submit(x), model.submit(2 * x)
    wait_until(answered.done)
    with model.rows(2) as rows:

        def child():
            for call in (ticket.result, answered.result, rows.infer):
                try:
                    call()
                except Refused as error:
                    assert "fork" in str(error)
                else:
                    return f"{call} gave something"
            return check_answers(model, 5, 5)

        assert in_child(child) == "right"
        rows.inputs["observation"][:] = x
        rows.infer()
        np.testing.assert_array_equal(rows.outputs["action"], 2 * x + 1)
    np.testing.assert_array_equal(ticket.result().outputs, 2 * x + 1)
    np.testing.assert_array_equal(answered.result().outputs, 4 * x + 1)


def test_a_surviving_child_does_not_keep_its_dead_parents_lanes(forkable, leased, server, connecting):
    """A lane's lock ends when its last descriptor is closed: a child must have none."""
    reader, writer = os.pipe()
    wait_until(lambda: lanes(server) == 0, 30, "no lanes in use")
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


def test_connections_closed_by_a_child_stay_open_for_its_parent(forkable, connecting):
    with connecting() as connection:
        model = connection.model("affine", rows=4)
        model(ROW)

        def child():
            model.close()
            connection.close()
            return "closed"

        assert in_child(child) == "closed"
        assert check_answers(model, 6, 5) == "right"


def test_a_child_of_a_child_gets_its_own_answers_too(forkable, client):
    model = client.model("affine", rows=8)
    model(ROW)
    assert in_child(
        lambda: [check_answers(model, 7, 5), in_child(lambda: check_answers(model, 8, 5)), check_answers(model, 9, 5)]
    ) == str(["right"] * 3)


def test_a_connection_without_a_model_works_in_a_child(forkable, client):
    assert in_child(lambda: check_answers(client.model("affine", rows=8), 10, 5)) == "right"
    assert client.models()


@pytest.mark.parametrize("transport", ["grpc"])
def test_over_grpc_a_child_is_refused(client):
    model = client.model("affine", rows=4)
    model(ROW)

    def child():
        from jurybox.client import connect

        refusals = []
        for call in (
            lambda: model(ROW),
            lambda: model.infer(ROW[None]),
            client.models,
            lambda: client.model("affine"),
            lambda: connect(client.address),
        ):
            try:
                call()
            except Refused as error:
                refusals.append("gRPC cannot be used" in str(error))
        client.close()
        return refusals

    assert in_child(child) == str([True] * 5)
    assert check_answers(model, 11, 5) == "right"
