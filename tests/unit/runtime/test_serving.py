"""A role that asks a server waits for published weights, and not for ever."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.runtime.toys import plan

from jurybox.client import ServerGone, Timeout
from jurybox.training.runtime import serving
from jurybox.training.runtime.plan import PolicyServer
from jurybox.training.runtime.serving import LeasedModel


class Context:
    """A role's context; its heartbeats are the only clock."""

    def __init__(self):
        self.plan = plan(server=PolicyServer("ipc:///nowhere", {"policy": "policy-1"}, timeout=40.0))
        self.now = 0.0

    def alive(self):
        self.now += 1.0


class Reply:
    def __init__(self, version):
        self.version = version


@pytest.fixture
def asking(monkeypatch):
    """A function that asks a server which answers at a time with a version, or with an error."""
    context = Context()
    monkeypatch.setattr(serving.time, "monotonic", lambda: context.now)
    monkeypatch.setattr(serving.time, "sleep", lambda seconds: None)

    def ask(answer, fresh=lambda version: True):
        class Model:
            def infer_reply(self, rows, timeout, version):
                found = answer(context.now)
                if isinstance(found, Exception):
                    raise found
                return Reply(found)

        leased = LeasedModel(context.plan.server, "policy", 1, context.alive)
        monkeypatch.setattr(leased, "_open", Model)
        return leased.infer(np.zeros((1, 3)), fresh).version, context.now

    return ask


def test_weights_that_nobody_published_are_an_error_after_the_time_out(asking):
    with pytest.raises(
        Timeout, match="policy-1 at ipc:///nowhere answers with the weights it was loaded with for 40 s"
    ):
        asking(lambda now: 0 if now < 1000 else 1)


def test_a_publication_within_the_time_out_is_waited_for(asking):
    assert asking(lambda now: 0 if now < 39 else 1) == (1, 39.0)


def test_the_wait_for_a_publication_begins_when_the_server_is_back(asking):
    def answer(now):
        return ServerGone("it is started again") if now < 35 else 0 if now < 70 else 7

    assert asking(answer) == (7, 70.0)


def test_old_weights_are_the_callers_to_give_up(asking):
    assert asking(lambda now: 1 if now < 500 else 2, lambda version: version == 2) == (2, 500.0)
