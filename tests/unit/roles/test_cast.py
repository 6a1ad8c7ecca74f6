"""Who plays which agent, in actors and evaluations: the newest policy, past ones, and an adapter's bots."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.algorithms.acting import algorithm, spec_of

from jurybox.training.algorithms.base import AlgorithmUnusable
from jurybox.training.environments.adapter import Moved, Result, Waiting
from jurybox.training.roles.env_actor import Cast, _Recorder, _Split
from jurybox.training.roles.evaluation import EnvEvaluator, Suite
from jurybox.training.roles.players import Player
from jurybox.training.roles.policy_client import NEWEST, PolicyClient
from jurybox.training.runtime.plan import ConfigError


class Duels:
    """Two agents that act together; each observes its environment's number, and is paid its action, once."""

    name, bound, agents = "duels", "they end", ("left", "right")

    def __init__(self, n):
        self.n, self.turn, self.acted, self.begun, self.playing = n, 0, [None, None], [], set()

    def begin(self, environment, seed):
        self.begun.append((environment, seed))
        self.playing.add(environment)

    def waiting(self):
        seen = np.arange(self.n, dtype=np.float32)[:, None]
        each = [Waiting(agent, {"numbers": seen}, seen) for agent in self.agents]
        return each[0]._replace(others=each[1:]) if self.turn == 0 else each[1]

    def step(self, actions):
        self.acted[self.turn], self.turn = actions[:, 0].copy(), 1 - self.turn
        if self.turn:
            return Moved((), 0, ())
        over, infos = np.ones(self.n, bool), [{}] * self.n
        results = [
            Result(agent, acted, over, ~over, np.zeros((self.n, 1)), infos, score=10.0 * acted)
            for agent, acted in zip(self.agents, self.acted, strict=True)
        ]
        won = {number: {"won": float(self.acted[0][number] > self.acted[1][number])} for number in self.playing}
        self.playing = set()
        return Moved(results, len(won), list(won), won)

    def scripted(self, name, seed):
        if name != "bot":
            raise KeyError(name)
        return lambda seen: np.full(1, 0.25 + seed / 100, np.float32)


class Policies(PolicyClient):
    """The newest policy chooses 0.5, "pool:N" N / 10; the rows that each is asked for are noted."""

    version = updates = 0
    extra = {}

    def __init__(self):
        self.asked = []

    def submit(self, observation, who=NEWEST, split=0):
        rows = observation["numbers"][:, 0].astype(int).tolist()
        self.asked.append((who, rows, split))
        chosen = 0.5 if who == NEWEST else int(who.removeprefix("pool:")) / 10
        return lambda: {"action": np.full((len(rows), 1), chosen, np.float32)}


def cast(n, split=0):
    made = algorithm("td3", spec_of(1, [], False, False, 1))
    adapter, policies = Duels(n), Policies()
    players = dict.fromkeys(adapter.agents, Player(made, policies))
    return adapter, policies, players, Cast(adapter, players, split)


def test_each_agent_is_played_by_whom_a_task_names_and_else_by_the_newest_policy() -> None:
    adapter, policies, _, found = cast(5, split=1)
    named = ["pool:1", "bot", NEWEST, "pool:2", "pool:1"]
    for environment, name in enumerate(named):
        found.begin(environment, environment, {"right": name})
    left, right = found.ask(adapter.waiting()), found.ask(adapter.waiting().others[0])
    assert policies.asked == [
        (NEWEST, [0, 1, 2, 3, 4], 1), ("pool:1", [0, 4], 1), ("pool:2", [3], 1), (NEWEST, [0, 1, 2, 3, 4], 1)
    ]  # fmt: skip
    assert left.past == [] and found.actions(left, np.full((5, 1), 0.5)).ravel().tolist() == [0.5] * 5
    np.testing.assert_allclose(found.actions(right, np.full((5, 1), 0.5)).ravel(), [0.1, 0.26, 0.5, 0.2, 0.1])
    assert [found.newest(environment) for environment in (1, 2)] == [["left"], ["left", "right"]]
    with pytest.raises(KeyError):
        found.begin(0, 0, {"right": "nobody"})


def test_a_past_policys_action_that_is_none_reaches_no_environment() -> None:
    adapter, _, _, found = cast(2)
    for environment, name in enumerate(("pool:3", "pool:11")):  # which chooses 1.1
        found.begin(environment, 0, {"right": name})
    asked = found.ask(adapter.waiting().others[0])
    with pytest.raises(AlgorithmUnusable, match=r"TD3.greedy chooses is \[1.1.*expected numbers in \[-1, 1\]"):
        found.actions(asked, None)


def test_the_newest_policy_is_not_asked_where_it_plays_nowhere() -> None:
    adapter, policies, _, found = cast(2)
    for environment in range(2):
        found.begin(environment, 7, {"right": "bot" if environment else "pool:3"})
    asked = found.ask(adapter.waiting().others[0])
    assert asked.newest is None and policies.asked == [("pool:3", [0], 0)]
    np.testing.assert_allclose(found.actions(asked, None).ravel(), [0.3, 0.32])
    for environment in range(2):  # the next episodes
        found.begin(environment, 7, {})
    again = found.ask(adapter.waiting().others[0])
    assert again.past == [] and again.newest is not None
    assert found.actions(again, again.newest()["action"]).ravel().tolist() == [0.5] * 2, "no bot stays"


def test_the_newest_policy_is_not_asked_where_its_actions_are_drawn_at_random() -> None:
    adapter, policies, _, found = cast(2)
    found.begin(0, 7, {"left": "pool:3"})
    asked = found.ask(adapter.waiting(), random=True)
    assert asked.random and asked.newest is None and policies.asked == [("pool:3", [0], 0)]
    found.begin(1, 7, {"left": "bot"})
    assert not found.ask(adapter.waiting(), random=True).random, "it plays in none of them"


def test_agents_that_act_together_are_asked_for_at_once_and_act_in_turn() -> None:
    adapter, policies, players, found = cast(3)
    recorders = {agent: _Recorder(player, None, np.arange(3), 0, None) for agent, player in players.items()}
    split = _Split(adapter, range(3), recorders, found)
    split.ask()
    assert len(policies.asked) == 2
    for agent in adapter.agents:
        asked = split.asked()
        assert asked.waiting.agent == agent
        adapter.step(asked.newest()["action"])
    assert len(policies.asked) == 2, "nobody is asked for twice"
    assert split.asked().waiting.agent == "left" and len(policies.asked) == 4


def test_an_evaluation_has_numbers_of_each_suite_and_of_all_from_the_newest_policys_side() -> None:
    adapter, _, players, found = cast(2)
    evaluator = EnvEvaluator.__new__(EnvEvaluator)
    evaluator.context, evaluator._bound = SimpleNamespace(alive=lambda: None, resetting=nullcontext), None
    evaluator._films = None
    evaluator._adapter, evaluator._players, evaluator._cast = adapter, players, found
    evaluator._explores, evaluator._against_random, evaluator._random_play = False, False, []
    evaluator._seeds = [20, 30, 40]
    evaluator._suites = [Suite("easy", {"right": "pool:1"}), Suite("bot", {"right": "bot"})]
    numbers = evaluator.evaluate()
    # The bot chooses 0.45, 0.55 and 0.65 in these episodes.
    assert {name: numbers[name] for name in ("won", "won_easy")} == {"won": pytest.approx(4 / 6), "won_easy": 1.0}
    assert numbers["won_bot"] == pytest.approx(1 / 3)
    assert numbers["return"] == numbers["return_bot"] == 5.0, "the score's, and not the opponents'"
    assert [seed for _, seed in adapter.begun] == [20, 30, 40] * 2


def test_an_algorithm_that_learns_from_its_own_steps_refuses_rows_of_others() -> None:
    on_policy = SimpleNamespace(algorithm=SimpleNamespace(on_policy=True), policy=None)
    replay = SimpleNamespace(parts=[None], streams=lambda n: object())
    with pytest.raises(ConfigError, match="leave such agents out of `recorded`"):
        _Recorder(on_policy, replay, np.arange(1), 0, None).check_others()
    _Recorder(on_policy, None, np.arange(1), 0, None).check_others()
