"""Environments that are vector environments alone: each autoreset mode makes the rows that single ones would."""

from __future__ import annotations

from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from tests.unit.gym_training.test_composed_actions import Told

from jurybox.training import policies
from jurybox.training.environments.making import EnvironmentUnusable
from jurybox.training.environments.vector_env import OneOfVector, VectorEnvs, make_vector
from jurybox.training.replay import Windows
from jurybox.training.roles.evaluation import play_episodes
from jurybox.training.runtime.plan import ConfigError
from jurybox.training.runtime.run import run
from jurybox.training.spaces import ContractBroken
from jurybox.training.trainings.gym import GymTraining, plan, train

HERE = f"{__name__}:"
MODES = list(AutoresetMode)


class Clock(gymnasium.Env):
    """Observes the number of its episode and its step, in a Dict; ends after 2 + (episode + number) % 3 steps."""

    observation_space = spaces.Dict({"episode": spaces.Box(0, 1000, (1,)), "step": spaces.Box(0, 10, ())})
    action_space = spaces.Discrete(2)

    def __init__(self, number: int, truncates: bool = False) -> None:
        self.number, self.truncates, self.episode, self.seeds = number, truncates, 0, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode, self.steps = self.episode + 1, 0
        return self._now(), {"action_mask": np.ones(2, np.bool_)}

    def step(self, action):
        self.steps += 1
        over = self.steps == 2 + (self.episode + self.number) % 3
        info = {"action_mask": np.ones(2, np.bool_), "audit": {"steps": float(self.steps)}}
        return self._now(), float(self.steps), over and not self.truncates, over and self.truncates, info

    def _now(self):
        return {"episode": np.array([self.episode], np.float32), "step": np.float32(self.steps)}


def clocks(num_envs: int, mode: str = "NextStep", truncates: bool = False) -> VectorEnv:
    makes = [lambda number=number: Clock(number, truncates) for number in range(num_envs)]
    return SyncVectorEnv(makes, autoreset_mode=AutoresetMode(mode))


def four_clocks(mode: str = "SameStep") -> VectorEnv:
    return clocks(4, mode)


def cart_poles(num_envs: int) -> VectorEnv:
    return gymnasium.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="vector_entry_point")


def adapter(n: int, mode: AutoresetMode, **more) -> VectorEnvs:
    return VectorEnvs(n, HERE + "clocks", {"mode": mode.value, **more}, clips=True)


def nothing(waiting):
    return np.zeros(len(waiting.rows), np.int64)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [1, 3])
def test_episodes_have_their_lengths_and_returns(mode, n) -> None:
    envs = adapter(n, mode)
    episodes = play_episodes(envs, list(range(2 * n)), nothing)
    again = play_episodes(envs, list(range(2 * n)), nothing)  # all begin anew, also those that rested
    for each in (*episodes, *again):
        assert 2 <= each.length <= 4 and each.total == sum(range(1, each.length + 1))
    firsts = [2 + (1 + number) % 3 for number in range(n)]
    assert [each.length for each in episodes[:n]] == firsts
    envs.close()


@pytest.mark.parametrize("mode", MODES)
def test_seeds_count_where_all_begin_at_once_and_with_disabled_in_each_episode(mode) -> None:
    envs = adapter(2, mode)
    play_episodes(envs, [5, 6, 7, 8], nothing)
    found = [env.seeds for env in envs.env.envs]
    assert [each[0] for each in found] == [5, 6]
    assert [each[1] for each in found] == ([7, 8 + 1] if mode is AutoresetMode.DISABLED else [None, None])


@pytest.mark.parametrize("mode", MODES)
def test_a_step_tells_of_the_environments_that_acted(mode) -> None:
    envs = adapter(3, mode)
    for number in range(3):
        envs.begin(number, number)
    taken, steps = 0, []
    for _ in range(12):
        before = {name: each.copy() for name, each in envs.waiting().observation.items()}
        moved = envs.step(np.zeros(3, np.int64))
        (result,) = moved.results
        acted = result.acted
        taken += moved.steps
        assert moved.steps == acted.sum() and (mode is AutoresetMode.NEXT_STEP or acted.all())
        assert (result.reward[acted] == before["step"][acted] + 1).all() and not result.reward[~acted].any()
        after = result.rows.reshape(3, 2)  # the last observation of its own episode, not the first of the next
        assert (after[acted] == np.stack([before["episode"][:, 0], before["step"] + 1], 1)[acted]).all()
        steps += [result.infos[place]["audit"]["steps"] for place in np.flatnonzero(acted)]
        for number in moved.over:
            envs.begin(number, 0)
    assert len(steps) == taken and set(steps) == {1.0, 2.0, 3.0, 4.0}


@pytest.mark.parametrize(
    ("algorithm", "truncates", "mode"),
    [
        *(("dqn", True, mode) for mode in MODES),
        *(pytest.param("dqn", False, mode, marks=pytest.mark.runs) for mode in MODES),
        ("ppo", False, MODES[0]),
    ],
)
def test_no_row_of_a_training_goes_over_the_end_of_an_episode(tmp_path, mode, algorithm, truncates) -> None:
    own = {"n_steps": 8, "batch_size": 8} if algorithm == "ppo" else {"learning_starts": 8, "buffer_size": 500}
    settings = GymTraining(
        env=HERE + "clocks", env_args={"mode": mode.value, "truncates": truncates}, vector=True, algorithm=algorithm,
        envs=3, steps=120, hidden=(4,), evaluation_episodes=4, evaluate_every=40, action_masks=True, **own,
    )  # fmt: skip
    rows = {}

    def watch(shared):
        if algorithm == "dqn" and shared.scoreboard.env_steps > 30:
            batch = shared.replay("policy").sample(64, windows=Windows(n_step=1, next=("observation",)))
            found = zip(batch["observation"].tolist(), batch["next_observation"].tolist(), strict=True)
            for (now, after), done in zip(found, batch["terminated"].tolist(), strict=True):
                rows[tuple(now)] = tuple(after), done

    outcome = run(plan(settings), tmp_path, Mock(), serial=True, watch=watch)
    assert 2.0 <= outcome.evaluation["eval_length"] <= 4.0 and outcome.env_steps >= 120
    for (episode, step), (after, done) in rows.items():
        assert after == ((episode, step) if done else (episode, step + 1))
    assert algorithm == "ppo" or len(rows) > 20


def test_a_policy_of_a_vector_environment_is_played(tmp_path) -> None:
    small = {"steps": 256, "n_steps": 32, "batch_size": 32, "hidden": (8,), "evaluation_episodes": 2}
    train(GymTraining(env=HERE + "cart_poles", vector=True, envs=4, **small), tmp_path, serial=True)
    assert len(policies.play(policies.Policy(policies.choose(tmp_path)), 2)) == 2
    env = OneOfVector(HERE + "clocks", {"mode": "SameStep"})
    observation, _ = env.reset(seed=3)
    assert env.observation_space.contains(observation)
    for step in (1, 2, 3):
        observation, reward, terminated, _, info = env.step(0)
        assert (observation["step"], reward, info["audit"]["steps"]) == (step, step, step)
    assert terminated
    assert env.reset()[0]["step"] == 0


def robots(num_envs: int, mode: str = "SameStep") -> VectorEnv:
    return SyncVectorEnv([Told for _ in range(num_envs)], autoreset_mode=AutoresetMode(mode))


@pytest.mark.parametrize("mode", [MODES[0], *(pytest.param(mode, marks=pytest.mark.runs) for mode in MODES[1:])])
def test_a_dict_of_actions_is_what_each_environment_is_told(tmp_path, mode) -> None:
    """They assert that their spaces contain it."""
    settings = GymTraining(
        env=HERE + "robots", env_args={"mode": mode.value}, vector=True, envs=3, steps=96, n_steps=16, batch_size=48,
        hidden=(8,), evaluation_episodes=2, evaluate_every=0,
    )  # fmt: skip
    train(settings, tmp_path, serial=True)
    assert len(policies.play(policies.Policy(policies.choose(tmp_path)), 2)) == 2


def test_what_does_not_fit_is_a_sentence(tmp_path) -> None:
    with pytest.raises(EnvironmentUnusable, match=r"gave a Clock.*: expected a gymnasium.vector.VectorEnv"):
        make_vector(HERE + "Clock", {"number": 1}, 1)
    with pytest.raises(EnvironmentUnusable, match="gave 4 environments: expected 5"):
        make_vector(HERE + "four_clocks", {}, 5)
    with pytest.raises(ConfigError, match="always makes 4 environments, and each worker is to have 3"):
        plan(GymTraining(env=HERE + "four_clocks", vector=True, envs=3))
    with pytest.raises(ConfigError, match="n_stack is set and would have no effect: vector is true"):
        GymTraining.read(None, {"env": "CartPole-v1", "vector": True, "n_stack": 2})
    with pytest.raises(EnvironmentUnusable, match=r"metadata\['autoreset_mode'\] = 'later'"):
        make_vector(HERE + "unclear", {}, 2)
    envs = adapter(2, AutoresetMode.SAME_STEP)
    envs.begin(0, 0)
    with pytest.raises(ContractBroken, match="cannot begin an episode in one environment before another has ended"):
        envs.waiting()


def unclear(num_envs: int) -> VectorEnv:
    made = clocks(num_envs)
    made.metadata = {"autoreset_mode": "later"}
    return made
