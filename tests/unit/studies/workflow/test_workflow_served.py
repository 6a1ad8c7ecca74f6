"""A search's served policy uses the published weights only, and waits for a server that was stopped with it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.algorithms.acting import refined

from jurybox.client import Timeout
from jurybox.studies.workflow.served import ServedDefender
from jurybox.training.algorithms.ppo import PPOSettings

ROWS = np.zeros((3, 4), np.float32)


class Answers:
    """A model that answers with these versions, one after the other; None is a time-out before the answer."""

    def __init__(self, *versions):
        self.versions = list(versions)

    def submit(self, observations):
        return self

    def result(self, timeout):
        version = self.versions.pop(0)
        if version is None:
            raise Timeout("not within the time-out")
        logits = np.full((3, 2), version, np.float32)
        return SimpleNamespace(version=version, outputs={"logits": logits, "value": logits[:, 0]})


def policy(model):
    learner = refined(PPOSettings(hidden=(4,)), inputs=4, actions=2)
    return ServedDefender(learner, model, SimpleNamespace(publish=lambda state: 7))


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
