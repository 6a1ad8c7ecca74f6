"""A search's policy: served, it uses the published weights only; here, it acts on its device, and under masks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.unit.algorithms.acting import refined

from jurybox.client import Timeout
from jurybox.studies.workflow import policy as workflow_policy
from jurybox.studies.workflow.policy import MODEL, Defender, OwnNetwork, ServedNetwork, ServedWeights, WeightsNotAdopted
from jurybox.training.algorithms.networks import ActorCritic, Features
from jurybox.training.algorithms.ppo import PPOSettings
from jurybox.training.runtime import serving
from jurybox.training.runtime.plan import PolicyServer

ROWS = np.zeros((3, 4), np.float32)


class Answers:
    """A model that answers with these versions, one after the other, the last for ever; None: a time-out before it."""

    def __init__(self, *versions):
        self.versions, self.asked = list(versions), 0

    def submit(self, observation, timeout, version):
        assert observation["action_mask"].all(), "without a mask all actions may be chosen"
        return SimpleNamespace(result=lambda timeout: self.infer_reply(observation, timeout, version))

    def infer_reply(self, observation, timeout, version):
        self.asked += 1
        version = self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]
        if version is None:
            raise Timeout("not within the time-out")
        logits = np.full((3, 2), version, np.float32)
        return SimpleNamespace(version=version, outputs={"logits": logits, "value": logits[:, 0]})


def policy(model, adopted=30.0):
    """A defender whose network is computed by that model; what it publishes first is version 7."""
    weights = ServedWeights(PolicyServer("ipc:///nowhere", {MODEL: "policy-1"}, timeout=0.2), 3)
    weights.version = 6
    weights.model._open = lambda: model
    weights._channel.publish = lambda state, version: None
    learner = refined(PPOSettings(hidden=(4,)), inputs=4, actions=2, masked=True)
    return Defender(learner, ServedNetwork(learner, weights, adopted))


def test_every_answer_has_to_be_of_the_published_weights() -> None:
    """A server with several engines may answer with the new weights first, and then, by another, with older ones."""
    model = Answers(6, 7, 6, 6, 7, 8)
    acts = policy(model)
    assert [acts.act(ROWS)[2][0] for _ in range(3)] == [7, 7, 8] and model.asked == 6


def test_an_answer_may_come_after_a_pause_of_all_processes() -> None:
    assert policy(Answers(None, 7)).act(ROWS)[2][0] == 7


def test_a_server_that_does_not_answer_at_all_is_given_up() -> None:
    with pytest.raises(Timeout):
        policy(Answers(None)).act(ROWS)


def test_a_server_that_never_adopts_weights_is_given_up() -> None:
    model = Answers(6)
    with pytest.raises(WeightsNotAdopted, match="has not adopted version 7 .* answers are of version 6"):
        policy(model, adopted=0.2).act(ROWS)
    assert 2 < model.asked <= 0.2 / serving._POLL_SECONDS + 3, "it pauses in between"


def test_who_connects_again_publishes_again(monkeypatch) -> None:
    weights, published = ServedWeights(PolicyServer("ipc:///nowhere", {MODEL: "policy-1"}), 3), []
    monkeypatch.setattr(workflow_policy, "connect", lambda address, timeout: address)
    weights._channel.publish = lambda state, version: published.append((state, version))
    assert weights._reach() == "ipc:///nowhere" and not published, "there is nothing to publish yet"
    weights.publish({"w": 1})
    weights._reach()
    assert published == [({"w": 1}, 1)] * 2


def test_the_network_of_this_process_computes_on_its_device() -> None:
    class Elsewhere(ActorCritic):
        """Accepts what lies on its device alone, as a network on a GPU does; the outputs come back."""

        def forward(self, observation, mask):
            assert observation.device.type == mask.device.type == "meta"
            return torch.zeros(len(observation), 2), torch.ones(len(observation))

    learner = refined(PPOSettings(), Elsewhere(Features(4), 2, (8,), masked=True), inputs=4, actions=2, masked=True)
    learner.device = torch.device("meta")
    actions, _, values = Defender(learner).act(ROWS)
    assert actions.shape == (3,) and values.tolist() == [1.0] * 3


def test_a_masked_action_is_never_chosen_and_probabilities_are_those_that_are_learned_from() -> None:
    learner = refined(PPOSettings(hidden=(8,)), inputs=4, actions=5, masked=True)
    rng = np.random.default_rng(0)
    rows, masks = rng.normal(size=(500, 4)).astype(np.float32), rng.random((500, 5)) < 0.5
    masks[:, 2] |= ~masks.any(1)
    defender = Defender(learner, OwnNetwork(learner), rng)
    actions, log_probs, values = defender.act(rows, masks)
    assert masks[np.arange(500), actions].all() and len(set(actions.tolist())) == 5
    with torch.no_grad():
        given = (torch.from_numpy(each) for each in (rows, actions, masks))
        expected, _, plain = learner.acting.scores(*given)
    np.testing.assert_allclose(log_probs, expected.numpy(), atol=1e-5)
    np.testing.assert_allclose(values, plain.numpy(), atol=1e-6)
    best, certain, _ = defender.act(rows, masks, greedy=True)
    logits = np.where(masks, learner.acting(torch.from_numpy(rows), None)[0].detach().numpy(), -np.inf)
    assert (best == logits.argmax(1)).all() and not certain.any()
