"""Episodes are played as the learner and the log want them."""

from __future__ import annotations

import os
import signal
from functools import partial

import numpy as np
import pytest
from gymnasium.vector import VectorEnv

from jurybox.training.environments.cage import CageEnv, CageVectorEnv
from jurybox.training.environments.cage.tables import INDEX, Blue, action
from jurybox.training.search.environments import TRUTH
from jurybox.training.search.rollouts import INPUTS, play
from jurybox.training.search.settings import parse
from jurybox.training.vector import ProcessVectorEnv

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
    assert rollout.observations.shape == (20, 4, INPUTS) and INPUTS == 90
    assert (rollout.observations[:, :, 52:77] == np.eye(5)[list(ORDER)].ravel()).all()
    assert rollout.over[-1].all() and not rollout.over[:-1].any() and not rollout.terminated.any()
    paid = rollout.rewards.sum(0) - episodes.returns
    assert episodes.fixes.tolist() == [20] * 4 and 0 <= episodes.complied.sum() < 80
    np.testing.assert_allclose(paid, -30.0 * (episodes.judged - episodes.obeyed), atol=1e-3)
    assert (rollout.final_values[-1] == 21).all() and (rollout.values[-1] == 20).all()


def test_without_an_order_nothing_is_paid_for_compliance() -> None:
    env = CageVectorEnv(4, episode_length=20, autoreset_mode="Disabled")
    rollout, episodes = play(env, Always(0), None, steps=20, weight=30.0)
    assert not rollout.observations[:, :, 52:77].any()
    np.testing.assert_allclose(rollout.rewards.sum(0), episodes.returns, rtol=1e-5)


def test_masks_follow_the_decoys_that_stand() -> None:
    env = CageVectorEnv(2, episode_length=3, autoreset_mode="Disabled")
    policy = Always(action(Blue.TOMCAT, "Op_Host0"))
    rollout, _ = play(env, policy, None, steps=3, weight=0.0, use_masks=True)
    assert rollout.masks is not None and rollout.masks.shape == (3, 2, 145)
    tomcat = rollout.masks[:, :, policy.what]
    assert tomcat[0].all() and not tomcat[1:].any()


def test_the_defender_sleeps_through_a_head_start_and_learns_nothing_from_it() -> None:
    env = CageVectorEnv(3, episode_length=8, autoreset_mode="Disabled")
    policy = Always(action(Blue.RESTORE, "User1"))
    rollout, _ = play(env, policy, None, steps=8, weight=0.0, head_starts=np.array([0, 3, 5]))
    assert rollout.masks is not None
    only_sleep = ~rollout.masks[:, :, 1:].any(2)
    assert only_sleep.sum(0).tolist() == [0, 3, 5] and only_sleep[0].tolist() == [False, True, True]
    assert rollout.masks[~only_sleep].all()


class Tempted:
    """Restores the remaining hosts, user hosts if allowed."""

    def act(self, observations, masks=None, *, greedy=False):
        n = len(observations)
        restore = np.array([action(Blue.RESTORE, host) for host in ("User1", "User2", "User3", "User4", "Enterprise0")])
        looks = np.array([action(Blue.ANALYSE, host) for host in ("Enterprise0", "Enterprise1", "Enterprise2")])
        allowed = np.ones((n, 145), np.bool_) if masks is None else masks
        draw = np.random.default_rng(int(observations.sum()))
        chosen = np.where(draw.random(n) < 0.5, draw.choice(restore, n), draw.choice(looks, n))
        chosen = np.where(allowed[np.arange(n), chosen], chosen, draw.choice(looks, n))
        return np.where(allowed[:, 1], chosen, 0), np.zeros(n, np.float32), np.zeros(n, np.float32)


def test_with_masks_every_action_obeys() -> None:
    def obedience(mask_orders: bool) -> tuple[float, int]:
        env = CageVectorEnv(200, autoreset_mode="Disabled")
        env.reset(seed=1)
        starts = np.full(200, 12)
        options = {"steps": 60, "weight": 0.0, "head_starts": starts, "mask_orders": mask_orders}
        found = play(env, Tempted(), ORDER, **options)[1]
        return found.obedience, int(found.judged.sum())

    free, masked = obedience(False), obedience(True)
    assert free[1] > 40 and masked[1] > 40
    assert free[0] < 0.5 and masked[0] > 0.95


class Replaced(VectorEnv):
    """Two networks with hosts of two types compromised; after the first step some were replaced, with clean hosts."""

    def __init__(self, lost) -> None:
        self.num_envs, self.lost, self.steps = 2, np.array(lost), 0
        self.states = np.zeros((2, 13), np.int8)
        self.states[:, [INDEX["User1"], INDEX["Enterprise0"]]] = 1

    def _observations(self):
        return np.zeros((2, 52), np.int8)

    def reset(self, *, seed=None, options=None):
        return self._observations(), {"true_state": self.states}

    def step(self, actions):
        self.steps += 1
        no = np.zeros(2, np.bool_)
        info = {"true_state": self.states, "_true_state": ~no}
        if self.steps == 2:
            truth = np.where(self.lost[:, None], np.int8(0), self.states)
            info = {} if self.lost.all() else {"true_state": truth, "_true_state": ~self.lost}
            self.states = truth
        return self._observations(), np.zeros(2), no, self.lost & (self.steps == 2), info


@pytest.mark.parametrize("lost", [(True, True), (True, False)])
def test_a_network_that_was_replaced_has_obeyed_and_disobeyed_nothing(lost) -> None:
    _, episodes = play(Replaced(lost), Always(action(Blue.RESTORE, "User1")), ORDER, steps=5, weight=30.0)
    assert episodes.judged.tolist() == [0, 0] and episodes.returns.tolist() == [0.0, 0.0]


def test_an_episode_survives_the_death_of_the_only_worker() -> None:
    make = partial(CageEnv, episode_length=100)
    with ProcessVectorEnv([make, make], workers=1, info_fields=TRUTH) as env:
        env.reset(seed=1)

        def stepped(step: int) -> None:
            if step == 4:
                os.kill(env.pids[0], signal.SIGKILL)

        rollout, episodes = play(
            env, Always(action(Blue.RESTORE, "User1")), ORDER, steps=10, weight=30.0, stepped=stepped
        )
    assert rollout.over.sum() == 4, "both ended once before the last step"
    np.testing.assert_allclose(rollout.rewards.sum(0), episodes.returns - 30.0 * (episodes.judged - episodes.obeyed))
