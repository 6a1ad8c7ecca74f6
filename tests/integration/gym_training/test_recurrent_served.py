"""A recurrent policy on a server: its sessions remember what a policy in this process does, whatever fails between."""

from __future__ import annotations

import tomllib
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from tests.serving import serving
from tests.unit.gym_training.test_recurrent_policies import SMALL, settings
from tests.unit.gym_training.test_recurrent_replay_policies import settings as replayed

from jurybox.client import connect
from jurybox.training import policies
from jurybox.training.algorithms.registry import make
from jurybox.training.algorithms.served import raw_network
from jurybox.training.runtime.leased_sessions import LeasedSessions
from jurybox.training.spaces import REMEMBERED
from jurybox.training.trainings.gym import GymTraining, algorithm_of, spaces_of, train

ROWS, STEPS = 3, 14


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recurrent")
    train(settings(steps=64), folder / "run", serial=True)
    return folder / "run"


@pytest.fixture(scope="module")
def made_of():
    s = settings()
    return algorithm_of(s, spaces_of(s)[1])


@pytest.fixture(scope="module")
def server(made_of, tmp_path_factory):
    factory = "jurybox.training.algorithms.served_networks:gym_policy"
    policy = {"factory": factory, "args": made_of, "publish": "double_buffer"}
    allowed = {"factories": [f"{factory.partition(':')[0]}:*"], "grpc": "127.0.0.1:0"}
    with serving(tmp_path_factory.mktemp("server"), {}, **allowed) as running, running.connect() as client:
        client.load("policy", policy, keep=600.0, timeout=60.0)
        yield running


@pytest.mark.parametrize("over", ["shm", "grpc"])
def test_the_served_policy_is_the_local_one_over_episodes_also_after_stale_answers_and_a_lost_lane(
    server, made_of, over
) -> None:
    made, random = make(**made_of), np.random.default_rng(0)
    network = raw_network(made, seed=3)
    address = f"grpc://{server.listening('grpc')}" if over == "grpc" else server.address

    @contextmanager
    def reach():
        with connect(address, timeout=60.0) as connection:
            yield connection

    with connect(address, timeout=60.0) as connection:
        version = connection.publisher("policy").publish(network)
    leased = LeasedSessions(
        None, "policy", ROWS, lambda: None, name="policy", reach=reach, timeout=30.0, numbers=made.remembers
    )
    begins = random.random((STEPS, ROWS)) < 0.25
    memory, asked = np.zeros((ROWS, made.remembers), np.float32), 0
    for step in range(STEPS):
        for row in np.flatnonzero(begins[step]):
            leased.begin(row)
            memory[row] = 0.0
        seen = random.normal(size=(ROWS, 1)).astype(np.float32)
        if step == 6:
            leased.close()  # the server forgets its sessions with their lane
        left = 2 if step in (4, 9) else 0  # answers that are of weights that are too old

        def fresh(found: int) -> bool:
            nonlocal asked, left
            asked, left = asked + 1, left - 1
            return found >= version and left < 0

        before = leased.memory
        waiting = leased.submit({"observation": seen}, fresh)
        reply = waiting()
        with torch.inference_mode():
            logits, value, after = network(torch.from_numpy(seen), torch.from_numpy(memory))
        np.testing.assert_allclose(before, memory, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(reply.outputs["logits"], logits.numpy(), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(reply.outputs["value"], value.numpy(), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(reply.outputs[REMEMBERED], after.numpy(), rtol=1e-4, atol=1e-6)
        memory = after.numpy().copy()
    leased.close()
    assert asked >= STEPS + 4 and begins[1:].any() and not begins[1:].all()


@pytest.mark.runs
def test_an_exported_policy_on_a_server_remembers_in_sessions(run, tmp_path) -> None:
    loaded = policies.Policy(policies.choose(run))
    written = policies.served_config(loaded, tmp_path / "exported", run, {})
    exported = tomllib.loads(written.read_text())["models"]["policy"]
    exported["exported"] = str(written.parent / exported["exported"])
    policy, random = policies.Policy(policies.choose(run)), np.random.default_rng(1)
    policy.begin(ROWS)
    with (
        serving(tmp_path / "server", {"exported": exported}) as server,
        server.connect() as client,
        client.model("exported").sessions(ROWS) as sessions,
    ):
        for step in range(8):
            begun = np.array([step in (0, 5), step in (0, 3), step == 0])
            policy.begin(ROWS, ended=begun)
            seen = random.normal(size=(ROWS, 1)).astype(np.float32)
            assert sessions.infer(seen, reset=begun).tolist() == policy(seen).tolist()
        state = sessions.get_state()
    assert list(state) == ["memory"] and np.abs(state["memory"]).max() > 0
    np.testing.assert_allclose(state["memory"], policy._memory.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("algorithm", "cell"),
    [("ppo", "lstm"), ("ppo", "gru"), ("dqn", "lstm"), ("sac", "gru")],
)
def test_served_and_local_recurrent_policies_learn_the_same_serially(tmp_path, algorithm, cell) -> None:
    outcomes = {}
    for policy in ("local", "served"):
        given = {"recurrent": cell, "steps": 96, "policy": policy}
        s = GymTraining.checked({**SMALL, **given}) if algorithm == "ppo" else replayed(algorithm, **given)
        outcomes[policy] = train(s, tmp_path / policy, serial=True)
    assert outcomes["local"].learner_steps == outcomes["served"].learner_steps >= 3
    assert outcomes["local"].episodes == outcomes["served"].episodes
    # Actions that are numbers differ by the outputs' last bits, and so do rewards.
    assert outcomes["local"].return_mean == pytest.approx(outcomes["served"].return_mean, abs=1e-4)
    assert outcomes["local"].evaluation == pytest.approx(outcomes["served"].evaluation, abs=1e-2)
