"""Adapters of environments: what an actor and an evaluation see of Gymnasium's and PettingZoo's."""

from __future__ import annotations

import os
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo import AECEnv

from jurybox.training.checkpoints import Checkpoints
from jurybox.training.environments.gymnasium_env import EnvironmentUnusable, GymEnvs
from jurybox.training.environments.pettingzoo_env import World
from jurybox.training.replay import Replay, Windows
from jurybox.training.roles.evaluation import play_episodes
from jurybox.training.spaces import ContractBroken
from jurybox.training.trainings.marl import MarlTraining
from jurybox.training.trainings.marl_run import train


class Countdown(gymnasium.Env):
    """An episode has as many steps as its seed says; each is rewarded with the steps so far."""

    observation_space, action_space = spaces.Box(-np.inf, np.inf, (1,)), spaces.Discrete(2)
    begun: ClassVar[list[int]] = []
    steps: ClassVar[int] = 0

    def reset(self, *, seed=None, options=None):
        self.begun.append(seed)
        self.left, self.t = seed, 0
        return np.array([0], np.float32), {}

    def step(self, action):
        Countdown.steps += 1
        self.t += 1
        return np.array([self.t], np.float32), float(self.t), False, self.t == self.left, {}


@pytest.fixture
def countdowns():
    Countdown.begun.clear()
    Countdown.steps = 0
    return lambda n: GymEnvs(n, f"{__name__}:Countdown", {}, clips=True)


def nothing(waiting):
    return np.zeros(len(waiting.rows), np.int64)


def test_an_environment_whose_episode_is_over_rests_until_the_next_is_begun(countdowns) -> None:
    envs = countdowns(2)
    envs.begin(0, 1)
    envs.begin(1, 3)
    results, steps, over, _ = envs.step(np.zeros(2))
    assert (steps, over, results[0].truncated.tolist()) == (2, [0], [True, False])
    results, steps, over, _ = envs.step(np.zeros(2))
    assert (steps, over, results[0].reward.tolist(), Countdown.steps) == (1, [], [0.0, 2.0], 3)
    assert not results[0].truncated.any() and envs.waiting().rows.ravel().tolist() == [1, 2]
    envs.begin(0, 5)
    assert envs.step(np.zeros(2)).steps == 2


def test_rows_and_results_stay_as_they_are_while_the_environments_go_on(countdowns) -> None:
    envs = countdowns(1)
    envs.begin(0, 3)
    before = envs.waiting().rows
    after = envs.step(np.zeros(1)).results[0].rows
    envs.step(np.zeros(1))
    assert (before.item(), after.item()) == (0, 1)


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_each_episode_is_played_once_however_many_are_played_side_by_side(countdowns, n) -> None:
    seeds, begins, ended = [3, 1, 1, 5, 2], [], []
    episodes = play_episodes(countdowns(n), seeds, nothing, begins=begins.append, ended=ended.append)
    assert [each.length for each in episodes] == seeds
    assert [each.total for each in episodes] == [sum(range(1, seed + 1)) for seed in seeds]
    assert sorted(Countdown.begun) == sorted(seeds) and sorted(begins) == [0, 1, 2, 3, 4]
    assert sorted(each.length for each in ended) == sorted(seeds)


def test_an_episode_that_takes_too_long_is_named_and_one_without_a_bound_is_played(countdowns) -> None:
    with pytest.raises(ContractBroken, match="Countdown has not ended after 4 steps: set max_episode_steps"):
        play_episodes(countdowns(1), [9], nothing, most=4)
    assert play_episodes(countdowns(1), [9], nothing)[0].length == 9


class Replies(AECEnv):
    """Two agents act in turns. What an action was worth is known when the other has acted: own + 10 * the other's."""

    metadata: ClassVar = {"name": "replies", "render_modes": []}
    render_mode = None

    def __init__(self, rounds=3):
        super().__init__()
        self.possible_agents, self.rounds = ["a", "b"], rounds

    def observation_space(self, agent):
        return spaces.Box(0, 1000, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(3, start=4)

    def observe(self, agent):
        return np.array([10 * self.round + "ab".index(agent) + 1], np.float32)

    def reset(self, seed=None, options=None):
        self.agents, self.round, self.chosen = list(self.possible_agents), 0, {}
        self.agent_selection = "a"
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        assert self.action_space(agent).contains(np.int64(action))
        self._cumulative_rewards[agent] = 0.0
        self.chosen[agent] = action - 4
        self.rewards = dict.fromkeys(self.agents, 0.0)
        if agent == "b":
            a, b = self.chosen["a"], self.chosen["b"]
            self.rewards = {"a": a + 10.0 * b, "b": b + 10.0 * a}
            self.round += 1
            self.truncations = dict.fromkeys(self.agents, self.round == self.rounds)
        self._accumulate_rewards()
        self.agent_selection = "b" if agent == "a" else "a"


def replies(rounds=3):
    return World(1, f"{__name__}:Replies", {"rounds": rounds}, {"a": 2, "b": 1})


def told(moved):
    return [(each.agent, each.reward.item(), each.truncated.item()) for each in moved.results], moved.steps, moved.over


def test_a_result_is_told_when_it_is_known_and_a_step_is_a_turn_of_all() -> None:
    world = replies(rounds=2)
    world.begin(0, 0)
    assert world.waiting().agent == "a"
    assert told(world.step(np.array([1]))) == ([("b", 0.0, False)], 0, [])
    assert world.waiting().agent == "b"
    assert told(world.step(np.array([2]))) == ([("a", 21.0, False)], 1, [])
    assert told(world.step(np.array([0]))) == ([("b", 12.0, False)], 0, [])
    assert told(world.step(np.array([1]))) == ([("a", 10.0, True), ("b", 1.0, True)], 1, [0])
    (episode,) = play_episodes(world, [1], nothing)
    assert (episode.length, episode.totals) == (2, {"a": 0.0, "b": 0.0})


def test_an_agent_sees_its_last_observations_and_of_an_episode_the_first_one_so_many_times() -> None:
    world = replies()
    world.begin(0, 0)
    first = world.waiting()
    assert first.observation["observation"].tolist() == [[[1.0], [1.0]]]
    world.step(np.array([0]))
    (result,) = world.step(np.array([0])).results
    second = world.waiting()
    assert second.observation["observation"].tolist() == [[[1.0], [11.0]]]
    assert result.rows.tolist() == second.rows.tolist() == [[1.0, 11.0]]
    assert first.rows.tolist() == [[1.0, 1.0]], "what was told stays as it is"
    world.begin(0, 0)
    assert world.waiting().observation["observation"].tolist() == [[[1.0], [1.0]]], "nothing of an earlier episode"


def test_a_process_has_one_world() -> None:
    with pytest.raises(EnvironmentUnusable, match="2 worlds in one process: expected 1"):
        World(2, f"{__name__}:Replies", {}, {"a": 1, "b": 1})


@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_a_row_has_the_reward_of_its_own_action(tmp_path, algorithm) -> None:
    own = {"learning_starts": 10} if algorithm == "dqn" else {"ppo": {"n_steps": 10, "n_epochs": 1}}
    settings = MarlTraining(
        algorithm=algorithm, env=f"{__name__}:Replies", steps=40, batch_size=8, hidden=(8,), log_dir=tmp_path,
        evaluation_episodes=1, **own,
    )  # fmt: skip
    outcome = train(settings, serial=True)
    assert outcome.episodes == 13 and set(outcome.evaluation) >= {"eval_return_a", "eval_random_b"}
    folder, rows = Checkpoints(tmp_path / "checkpoints").latest().folder, {}
    for agent in "ab":
        with Replay.load(folder / f"replay-{agent}.jbr", f"replies-{agent}-{os.getpid()}") as replay:
            replay.unlink()
            part, n = replay.parts[0], len(replay)
            # In a replay that is sampled, each episode's three rows are followed by its last observation.
            kept = np.arange(n) % 4 < 3 if algorithm == "dqn" else np.ones(n, np.bool_)
            rows[agent] = [part.field_rows(name, 0, n)[kept][:39].astype(float) for name in ("action", "reward")]
    (a, of_a), (b, of_b) = rows["a"], rows["b"]
    assert len(a) == len(b) == 39 and len(set(a)) == len(set(b)) == 3
    assert (of_a == a + 10 * b).all() and (of_b == b + 10 * a).all()


class Vanishing(Replies):
    """At the end of an episode its agents are gone, and none was told that it ended. Episodes observe other numbers."""

    episode: ClassVar[int] = 0

    def observe(self, agent):
        return super().observe(agent) + 100 * self.episode

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        Vanishing.episode += 1

    def step(self, action):
        super().step(action)
        if any(self.truncations.values()):
            self.agents = []


@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_no_row_joins_two_episodes_where_agents_leave_without_a_word(tmp_path, algorithm) -> None:
    own = {"learning_starts": 10} if algorithm == "dqn" else {"ppo": {"n_steps": 10, "n_epochs": 1}}
    settings = MarlTraining(
        algorithm=algorithm, env=f"{__name__}:Vanishing", steps=40, batch_size=8, hidden=(8,), n_stack=1,
        log_dir=tmp_path, evaluation_episodes=1, gamma=0.5, **own,
    )  # fmt: skip
    Vanishing.episode = 0
    train(settings, serial=True)
    folder = Checkpoints(tmp_path / "checkpoints").latest().folder
    for agent in "ab":
        with Replay.load(folder / f"replay-{agent}.jbr", f"vanishing-{agent}-{os.getpid()}") as replay:
            replay.unlink()
            if algorithm == "ppo":
                part, n = replay.parts[0], len(replay)
                now, after = (part.field_rows(name, 0, n).ravel() for name in ("observation", "next_observation"))
            else:
                batch = replay.sample(200, replay.batch(200, Windows(n_step=1, gamma=0.5, next=("observation",))))
                now, after = batch["observation"].ravel(), batch["next_observation"].ravel()
            assert len(now) > 20 and (now // 100 == after // 100).all(), "of one episode"
    world = World(1, f"{__name__}:Vanishing", {"rounds": 1}, {"a": 1, "b": 1})
    world.begin(0, 0)
    world.step(np.array([1]))
    results, steps, over, _ = world.step(np.array([2]))
    assert sorted((each.agent, each.reward.item(), each.truncated.item()) for each in results) == [
        ("a", 21.0, True),
        ("b", 12.0, True),
    ]
    assert (steps, over) == (1, [0])


class Nobody(Replies):
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.agents = []


def test_a_world_that_begins_without_agents_is_named() -> None:
    with pytest.raises(ContractBroken, match="Nobody began an episode in which no agent may act"):
        World(1, f"{__name__}:Nobody", {}, {"a": 1, "b": 1}).begin(0, 0)
