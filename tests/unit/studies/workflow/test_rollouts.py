"""Episodes are played as the learner and the log want them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from gymnasium.vector import VectorEnv
from tests.unit.algorithms.acting import refined
from tests.unit.studies.workflow.mortal_env import Mortal

from jurybox.studies.workflow.cage import CageEnv, CageVectorEnv
from jurybox.studies.workflow.cage.tables import INDEX, Blue, action
from jurybox.studies.workflow.compliance import Orders, in_turn, types_of
from jurybox.studies.workflow.environments import TRUTH
from jurybox.studies.workflow.networks import INPUTS, DefendedNetworks, Situation
from jurybox.studies.workflow.policy import Defender
from jurybox.studies.workflow.rollouts import play
from jurybox.studies.workflow.settings import parse
from jurybox.training.algorithms.ppo import PPOSettings, advantages_of
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
    assert rollout.observation.shape == (20, 4, INPUTS) and INPUTS == 103
    assert (rollout.observation[:, :, 52:77] == np.eye(5)[list(ORDER)].ravel()).all()
    assert rollout.ended[-1].all() and not rollout.ended[:-1].any() and not rollout.terminated.any()
    paid = rollout.reward.sum(0) - episodes.returns
    assert episodes.fixes.tolist() == [20] * 4 and 0 <= episodes.complied.sum() < 80
    np.testing.assert_allclose(paid, -30.0 * (episodes.judged - episodes.obeyed), atol=1e-3)
    assert (rollout.next_value[-1] == 21).all() and (rollout.value[-1] == 20).all()


def test_without_an_order_nothing_is_paid_for_compliance() -> None:
    env = CageVectorEnv(4, episode_length=20, autoreset_mode="Disabled")
    rollout, episodes = play(env, Always(0), None, steps=20, weight=30.0)
    assert not rollout.observation[:, :, 52:77].any()
    np.testing.assert_allclose(rollout.reward.sum(0), episodes.returns, rtol=1e-5)


@pytest.mark.parametrize(("shown", "sees"), [(True, True), (False, True), (True, False)])
def test_the_input_says_whose_turn_it_is_by_the_order_that_the_policy_sees(shown: bool, sees: bool) -> None:
    env = CageVectorEnv(50, episode_length=30, autoreset_mode="Disabled")
    networks = DefendedNetworks([env], 30, with_orders=sees, show_turns=shown)
    for number in range(50):
        networks.assign(number, Situation(ORDER))
    networks.reset(seed=0)
    several = 0
    for _ in range(30):
        networks.step(np.zeros(50, np.int64))
        turns = networks.seen[:, 90:].astype(bool)
        in_doubt = networks._doubts.hosts(networks.seen[:, :52])
        several += int((types_of(in_doubt).sum(1) > 1).sum())
        expected = in_turn(in_doubt, Orders.of(ORDER if sees else None, 50)) & shown
        np.testing.assert_array_equal(turns, expected)
        assert (networks.seen[:, 52:77].any() == sees) and turns.shape == (50, 13)
    assert several > 100, "or the order decided nothing"


def test_masks_follow_the_decoys_that_stand() -> None:
    env = CageVectorEnv(2, episode_length=3, autoreset_mode="Disabled")
    policy = Always(action(Blue.TOMCAT, "Op_Host0"))
    rollout, _ = play(env, policy, None, steps=3, weight=0.0, use_masks=True)
    assert rollout.mask is not None and rollout.mask.shape == (3, 2, 145)
    tomcat = rollout.mask[:, :, policy.what]
    assert tomcat[0].all() and not tomcat[1:].any()


def test_the_defender_sleeps_through_a_head_start_and_learns_nothing_from_it() -> None:
    env = CageVectorEnv(3, episode_length=8, autoreset_mode="Disabled")
    policy = Always(action(Blue.RESTORE, "User1"))
    rollout, _ = play(env, policy, None, steps=8, weight=0.0, head_starts=np.array([0, 3, 5]))
    assert rollout.mask is not None
    only_sleep = ~rollout.mask[:, :, 1:].any(2)
    assert only_sleep.sum(0).tolist() == [0, 3, 5] and only_sleep[0].tolist() == [False, True, True]
    assert rollout.mask[~only_sleep].all()


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


class Cut(CageVectorEnv):
    """Truncates the first network at its fifth step; "restarted": as where its process was replaced, once or for ever.

    The first network's rewards are much worse, so that it is seen where they count.
    """

    def __init__(self, *given, restarted=False, times=1, first=0, **more) -> None:
        super().__init__(*given, autoreset_mode="Disabled", **more)
        self.restarted, self.times, self.first, self.steps = restarted, times, first, 0

    def reset(self, **given):
        self.steps = 0
        return super().reset(**given)

    def step(self, actions):
        observation, reward, terminated, truncated, info = super().step(actions)
        self.steps += 1
        reward = reward - np.array([1000.0 * (i == 0) for i in range(self.num_envs)])
        if self.steps == 5 and self.times:
            self.times -= 1
            cut = np.arange(self.num_envs) <= self.first
            truncated = truncated | cut
            if self.restarted:
                info = {**info, "restarted": cut, "_restarted": cut}
        return observation, reward, terminated, truncated, info


@pytest.mark.parametrize("restarted", [False, True])
def test_a_network_that_was_truncated_is_bootstrapped_and_its_reset_is_not_learned_from(restarted) -> None:
    s = PPOSettings(normalise_returns=True)
    learner = refined(s, inputs=INPUTS, actions=145, masked=True)
    learner.returns = (-60.0, 20.0, 5)  # the critic's scale after some updates of this task
    env = Cut(2, episode_length=20, restarted=restarted)
    env.reset(seed=0)
    rollout, episodes = play(env, Defender(learner), None, steps=20, weight=0.0)
    lost = [4] if restarted else []
    assert rollout.ended[:, 0].nonzero()[0].tolist() == [*([3] if restarted else []), 4, 5, 19]
    assert rollout.ended[:, 1].nonzero()[0].tolist() == [19] and rollout.valid[:, 1].all()
    assert (~rollout.valid[:, 0]).nonzero()[0].tolist() == [*lost, 5]
    assert episodes.whole.tolist() == [False, True]
    at = 3 if restarted else 4
    following = learner.values(rollout.observation[at + 1, :1])[0]
    assert rollout.next_value[at, 0] == pytest.approx(following) and following < -40
    expected = rollout.reward[at, 0] + s.gamma * following - rollout.value[at, 0]
    assert advantages_of(rollout, s)[at, 0] == pytest.approx(expected, rel=1e-5)


def test_parts_that_are_learned_from_in_between_are_bootstrapped_where_they_were_cut() -> None:
    env, parts = Cut(2, episode_length=20), []
    env.reset(seed=0)
    options = {"learn_every": 5, "learn": lambda part: parts.append((part, part.next_value.copy()))}
    play(env, Always(0), None, steps=20, weight=0.0, **options)
    first, final = parts[0]
    assert first.ended[-1].tolist() == [True, False] and (final[-1] == first.last_value).all()
    assert (~parts[1][0].valid[:, 0]).tolist() == [True, False, False, False, False]


def test_a_new_network_has_no_doubts_of_the_one_before() -> None:
    env = Cut(2, episode_length=30)
    env.reset(seed=3)
    before = CageVectorEnv._observations

    def stirred(self):
        found = before(self)
        if self.steps < 5:
            found[:, 0] = 1  # activity on the first host
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CageVectorEnv, "_observations", stirred)
        rollout, _ = play(env, Always(0), None, steps=10, weight=0.0)
    assert rollout.observation[5, :, 77].tolist() == [1, 1] and rollout.observation[7, :, 77].tolist() == [0, 1]


def test_an_episode_survives_the_death_of_the_only_worker(tmp_path) -> None:
    make = [partial(CageEnv, episode_length=100), partial(Mortal, tmp_path / "died")]
    with ProcessVectorEnv(make, workers=1, info_fields=TRUTH) as env:
        env.reset(seed=1)
        rollout, episodes = play(env, Always(action(Blue.RESTORE, "User1")), ORDER, steps=10, weight=30.0)
        assert env.restarts == 1
    assert rollout.ended[:, 0].nonzero()[0].tolist() == [3, 4, 5, 9] and not rollout.terminated.any()
    assert (~rollout.valid[:, 0]).nonzero()[0].tolist() == [4, 5], "the lost step, and the reset"
    assert (rollout.next_value[3] == rollout.value[4]).all() and not episodes.whole.any()
    np.testing.assert_allclose(rollout.reward.sum(0), episodes.returns - 30.0 * (episodes.judged - episodes.obeyed))
