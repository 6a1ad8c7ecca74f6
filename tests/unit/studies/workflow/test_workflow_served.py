"""A search's policy: served, it uses the published weights only; here, it acts on its device, and under masks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.unit.algorithms.acting import refined

from jurybox.client import Timeout
from jurybox.studies.workflow.policy import Defender, OwnNetwork, ServedNetwork
from jurybox.training.algorithms.networks import ActorCritic, Features
from jurybox.training.algorithms.ppo import PPOSettings

ROWS = np.zeros((3, 4), np.float32)


class Answers:
    """A model that answers with these versions, one after the other; None is a time-out before the answer."""

    def __init__(self, *versions):
        self.versions = list(versions)

    def submit(self, observation):
        assert observation["action_mask"].all(), "without a mask all actions may be chosen"
        return self

    def result(self, timeout):
        version = self.versions.pop(0)
        if version is None:
            raise Timeout("not within the time-out")
        logits = np.full((3, 2), version, np.float32)
        return SimpleNamespace(version=version, outputs={"logits": logits, "value": logits[:, 0]})


def policy(model):
    learner = refined(PPOSettings(hidden=(4,)), inputs=4, actions=2, masked=True)
    return Defender(learner, ServedNetwork(learner, model, SimpleNamespace(publish=lambda state: 7)))


def test_every_answer_has_to_be_of_the_published_weights() -> None:
    """A server with several engines may answer with the new weights first, and then, by another, with older ones."""
    model = Answers(6, 7, 6, 6, 7, 8)
    acts = policy(model)
    assert [acts.act(ROWS)[2][0] for _ in range(3)] == [7, 7, 8] and not model.versions


def test_an_answer_may_come_after_a_pause_of_all_processes() -> None:
    model = Answers(None, 7)
    assert policy(model).act(ROWS)[2][0] == 7


def test_a_server_that_does_not_answer_at_all_is_given_up() -> None:
    with pytest.raises(Timeout):
        policy(Answers(None, None)).act(ROWS)


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
