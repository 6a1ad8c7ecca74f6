"""A shared server that is started again gets the weights of a learner that has nothing new to publish."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from tests.serving import START, launch, wait_until
from tests.unit.runtime.toys import plan

from jurybox.protocol.weights import WeightsLayout
from jurybox.studies.workflow.networks import INPUTS
from jurybox.studies.workflow.policy import Defender, ServedNetwork, ServedWeights, learner_of, policy_server
from jurybox.studies.workflow.settings import WorkflowTraining
from jurybox.training.runtime import serving
from jurybox.training.runtime.plan import ChannelSpec
from jurybox.training.runtime.role_context import Learner, RoleContext
from jurybox.training.runtime.scoreboard import Word
from jurybox.training.runtime.serving import LeasedModel, served_models
from jurybox.training.runtime.shared_resources import SharedResources
from jurybox.training.runtime.turns import Rules, make_turn

MODEL = {"factory": "tests.models:affine", "publish": "double_buffer"}
X = np.ones((1, 4), np.float32)


def weights(version):
    return {"scale": np.array(version, np.float32), "offset": np.array(1000 * version, np.float32)}


class Idle(Learner):
    """Waits for rows, as an on-policy learner does whose actors wait for weights."""

    def step(self):
        raise AssertionError("no environment steps are made")

    def publication(self):
        return weights(3), {"updates": 0}


def plan_of(served):
    planned = plan(server=served.feed({"policy": "policy"}))
    actor, learner = planned.roles
    channels = (ChannelSpec("policy", WeightsLayout.of(weights(1))),)
    return replace(planned, roles=(actor, replace(learner, make=f"{__name__}:Idle")), channels=channels)


@pytest.mark.runs
@pytest.mark.timeout(300)
def test_a_server_that_is_started_again_gets_the_weights_of_an_idle_learner(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "KEEP", 4.0)  # how soon the run notices that its models are gone
    servers = [launch(tmp_path, {}, factories=["tests.models:*"])]
    over = threading.Event()
    try:
        wait_until(lambda: "supervisor serving" in servers[0].text(), START)
        with (
            served_models({"policy": MODEL}, servers[0].address) as served,
            SharedResources.create(planned := plan_of(served)) as shared,
        ):
            turn = make_turn(RoleContext(planned, 1, shared, print), Rules(planned, shared.scoreboard), None)
            actor = LeasedModel(planned.server, "policy", 1, RoleContext(planned, 0, shared, print).alive)

            def learn():
                while not over.wait(0.001):
                    assert not turn.may()

            learner = threading.Thread(target=learn)
            learner.start()
            try:
                first = actor.infer(X, lambda version: True)
                assert servers[0].stop() == 0
                servers.append(launch(tmp_path, {}, factories=["tests.models:*"]))
                again = actor.infer(X, lambda version: True)
                for reply in (first, again):
                    np.testing.assert_array_equal(reply.outputs, 3 * X + 3000)
                    assert reply.version == shared.scoreboard.words[1][Word.VERSION] == 1
                looked = time.monotonic()
                wait_until(lambda: turn._served._look_at > looked + 2.0, 30, "more looks, after which nothing changes")
                assert actor.infer(X, lambda version: True).version == 1
            finally:
                over.set()
                learner.join()
                actor.close()
                turn.close()
        with servers[1].connect() as client:
            assert client.models() == []
    finally:
        for server in servers:
            if server.process.poll() is None:
                server.stop()


@pytest.mark.runs
@pytest.mark.timeout(300)
def test_a_search_goes_on_with_its_newest_weights_where_its_server_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "KEEP", 4.0)
    allowed = {"factories": ["jurybox.training.algorithms.served_networks:*"]}
    servers = [launch(tmp_path, {}, **allowed)]
    try:
        wait_until(lambda: "supervisor serving" in servers[0].text(), START)
        settings = WorkflowTraining(envs=2, total_episodes=2, policy="served", server=servers[0].address)
        with policy_server(settings, tmp_path / "server.log") as server, closing(ServedWeights(server, 2)) as weights:
            learner = learner_of(settings.ppo)
            learner.setup(0, "cpu")
            served, own = Defender(learner, ServedNetwork(learner, weights)), Defender(learner)
            rows = np.random.default_rng(0).random((2, INPUTS)).astype(np.float32)
            for restarts in (False, True):
                if restarts:
                    assert servers[0].stop() == 0
                    servers.append(launch(tmp_path, {}, **allowed))
                np.testing.assert_allclose(served.act(rows, greedy=True)[2], own.act(rows, greedy=True)[2], atol=1e-5)
    finally:
        for server in servers:
            if server.process.poll() is None:
                server.stop()
