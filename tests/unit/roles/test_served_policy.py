"""A served policy's answers: of weights that are new enough, with the updates of the weights that computed them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from jurybox.training.roles import served_policy
from jurybox.training.roles.served_policy import ServedPolicy, StaleAnswers
from jurybox.training.runtime.scoreboard import Word


class Channel:
    """A context whose channel has published versions 1, 2, ... with 10 updates each, and its server's model."""

    def __init__(self, monkeypatch, answers):
        self.newest, self.answers, self.asked, self.followed = 0, iter(answers), [], None
        monkeypatch.setattr(served_policy, "LeasedModel", lambda server, channel, rows, alive: self)
        self.timeout, self.outputs, self.words = 0.0, ["values"], Counter()
        self.plan, self.alive = SimpleNamespace(server=None), lambda: None

    # Of the context, and of its reader.
    def reader(self, name):
        return self

    def follow(self, name, follower):
        self.followed = follower

    def buffers(self):
        return {}

    def newer_than(self, version):
        return self.newest > version

    def read(self, out, timeout):
        return out, self.newest, {"updates": 10 * self.newest}

    def publish(self):
        self.newest += 1
        self.followed.refresh()

    # Of the model.
    def submit(self, observation, fresh):
        return lambda: self.infer(fresh)

    def infer(self, fresh):
        while True:
            version = next(self.answers)
            self.asked.append(version)
            if fresh(version):
                return SimpleNamespace(version=version, outputs=np.full((1, 2), version, np.float32))


def acting(monkeypatch, answers, max_lag):
    channel = Channel(monkeypatch, answers)
    return channel, ServedPolicy(channel, "policy", rows=1, max_lag=max_lag)


@pytest.mark.parametrize(("max_lag", "taken"), [(0, 4), (1, 3), (3, 1), (None, 1)])
def test_an_answer_that_is_too_old_is_asked_for_again(monkeypatch, max_lag, taken) -> None:
    channel, policy = acting(monkeypatch, [1, 2, 3, 4], max_lag)
    for _ in range(4):
        channel.publish()
    assert policy.outputs({})["values"].tolist() == [[taken, taken]]
    assert (policy.version, policy.updates) == (taken, 10 * taken), "of the weights that computed it"
    assert channel.asked == [1, 2, 3, 4][:taken]
    assert channel.words[Word.FORCED] == (taken > 1), "answers that were held back are counted"


def test_a_server_that_never_takes_new_weights_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(served_policy, "_ADOPTED", 0.0)
    channel, policy = acting(monkeypatch, [1] * 1000, 0)
    channel.publish()
    assert policy.outputs({})["values"].tolist() == [[1, 1]]
    channel.publish()
    with pytest.raises(StaleAnswers, match="with version 1 .* long after version 2 was published"):
        policy.outputs({})


def test_what_acts_with_a_served_policy_needs_no_torch() -> None:
    modules = ("roles.env_actor", "roles.served_policy", "environments.gymnasium_env", "environments.pettingzoo_env")
    imports = "; ".join(f"import jurybox.training.{module}" for module in modules)
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
