"""Episodes are played as the learner and the log want them."""

from __future__ import annotations

import numpy as np

from jurybox.training.environments.cage import CageVectorEnv
from jurybox.training.environments.cage.tables import Blue, action
from jurybox.training.search.rollouts import INPUTS, play
from jurybox.training.search.settings import encode, parse

ORDER = parse("enterprise, op_server, op_host, user, defender")


class Always:
    """Does one thing; values count the calls."""

    def __init__(self, what: int) -> None:
        self.what, self.calls, self.masks = what, 0, None

    def act(self, observations, masks=None, *, greedy=False):
        self.calls += 1
        self.masks = masks if masks is not None else self.masks
        n = len(observations)
        return np.full(n, self.what), np.zeros(n, np.float32), np.full(n, self.calls, np.float32)


def test_observations_carry_the_order_and_returns_do_not_carry_alignment() -> None:
    env = CageVectorEnv(4, episode_length=20, autoreset_mode="Disabled")
    policy = Always(action(Blue.RESTORE, "User1"))
    rollout, episodes = play(env, policy, ORDER, steps=20, weight=30.0)
    assert rollout.observations.shape == (20, 4, INPUTS) and INPUTS == 77
    assert (rollout.observations[:, :, 52:] == encode(ORDER)).all()
    assert rollout.over[-1].all() and not rollout.over[:-1].any() and not rollout.terminated.any()
    paid = rollout.rewards.sum(0) - episodes.returns
    assert episodes.fixes == 80 and 0 <= episodes.complied < 80
    np.testing.assert_allclose(paid.sum(), 30.0 * episodes.rate * 4, rtol=1e-4)
    assert (rollout.final_values[-1] == 21).all() and (rollout.values[-1] == 20).all()


def test_without_an_order_nothing_is_paid_for_compliance() -> None:
    env = CageVectorEnv(4, episode_length=20, autoreset_mode="Disabled")
    rollout, episodes = play(env, Always(0), None, steps=20, weight=30.0)
    assert not rollout.observations[:, :, 52:].any()
    np.testing.assert_allclose(rollout.rewards.sum(0), episodes.returns, rtol=1e-5)


def test_masks_follow_the_decoys_that_stand() -> None:
    env = CageVectorEnv(2, episode_length=3, autoreset_mode="Disabled")
    policy = Always(action(Blue.TOMCAT, "Op_Host0"))
    rollout, _ = play(env, policy, None, steps=3, weight=0.0, use_masks=True)
    assert rollout.masks is not None and rollout.masks.shape == (3, 2, 145)
    tomcat = rollout.masks[:, :, policy.what]
    assert tomcat[0].all() and not tomcat[1:].any()
