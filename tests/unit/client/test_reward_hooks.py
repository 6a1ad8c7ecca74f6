"""Each trainer's hook with a played juror: the columns that it asks with, and what it makes of scores and of none."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import pickle
import sys
from types import ModuleType, SimpleNamespace

import gymnasium
import numpy as np
import pytest

from jurybox.client import RowFailed, rewards
from jurybox.client.juror import Scores

LACKING = "no score came"


class PlayedJuror:
    """Scores rows 1, 2, 3, ...; `lacks`: the rows that have none."""

    asked: list[tuple[dict, int]] = []
    lacks: tuple[int, ...] = ()
    parts: dict[str, list] = {}
    scored: list | None = None

    def __init__(self, model, **arguments):
        self.name, self.arguments = str(model), arguments

    def scores(self, columns, n):
        PlayedJuror.asked.append((dict(columns), n))
        found = list(self.scored) if self.scored is not None else [float(i + 1) for i in range(n)]
        scored = Scores([LACKING if i in self.lacks else score for i, score in enumerate(found)])
        scored.parts = self.parts
        return scored

    async def scores_async(self, columns, n):
        return self.scores(columns, n)


@pytest.fixture(autouse=True)
def juror(monkeypatch):
    monkeypatch.setattr(rewards, "Juror", PlayedJuror)
    for name, value in (("asked", []), ("lacks", ()), ("parts", {}), ("scored", None)):
        monkeypatch.setattr(PlayedJuror, name, value)
    return PlayedJuror


def called(function, *arguments, **named):
    result = function(*arguments, **named)
    return asyncio.run(result) if inspect.isawaitable(result) else result


@pytest.mark.parametrize("asynchronous", [False, True])
def test_trl_gets_none_where_a_reward_is_missing(juror, caplog, asynchronous):
    reward = rewards.trl_reward("a/b", asynchronous=asynchronous, inputs={"text": "completions"})
    assert reward.__name__ == "a_b" and rewards.trl_reward("m", name="mine").__name__ == "mine"
    assert inspect.iscoroutinefunction(reward) == asynchronous
    with caplog.at_level(logging.WARNING):
        assert called(reward, prompts=["p", "q"], completions=["x", "y"], more=[1, 2]) == [1.0, 2.0]
        assert not caplog.records
        juror.lacks = (1,)
        assert called(reward, prompts=["p", "q"], completions=["x", "y"]) == [1.0, None]
    assert "1 of 2 rewards of 'a/b' are missing; the first: no score came" in caplog.text
    assert juror.asked[0] == ({"completions": ["x", "y"], "prompts": ["p", "q"], "more": [1, 2]}, 2)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_verl_asks_with_what_it_was_given_and_the_entries_of_extra_info(juror, asynchronous):
    score = rewards.verl_score("m", asynchronous=asynchronous)
    assert inspect.iscoroutinefunction(score) == asynchronous
    given = {"solution_str": "s", "ground_truth": None, "data_source": "d", "extra_info": {"split": "t", "index": 0}}
    assert called(score, **given) == 1.0
    columns, n = juror.asked[0]
    assert n == 1 and columns == {
        key: [value] for key, value in {**given, "split": "t", "index": 0}.items() if value is not None
    }
    assert called(score, solution_str="s", extra_info=None) == 1.0
    assert called(score, solution_str="mine", extra_info={"solution_str": "other"}) == 1.0
    assert juror.asked[-1][0]["solution_str"] == ["mine"]
    juror.lacks = (0,)
    with pytest.raises(RowFailed, match="1 of 1 rewards of 'm' are missing; the first: no score came"):
        called(score, solution_str="s")
    assert math.isnan(called(rewards.verl_score("m", asynchronous=asynchronous, missing="nan"), solution_str="s"))


def test_verls_batches_have_the_columns_in_plural_and_in_singular(juror):
    score = rewards.verl_batch_score("m")
    extras = [{"a": 1, "b": 2}, {"a": 3}]
    assert score(["d", "e"], ["s", "t"], ["g", "h"], extras, unknown=1) == [1.0, 2.0]
    columns, n = juror.asked[0]
    singular = {"data_source": ["d", "e"], "solution_str": ["s", "t"], "ground_truth": ["g", "h"]}
    assert n == 2 and columns == {**singular, **{f"{key}s": value for key, value in singular.items()}, "a": [1, 3]}
    score(["d"], ["s"], ["g"], [None])
    assert "a" not in juror.asked[-1][0]
    juror.lacks = (0,)
    with pytest.raises(RowFailed):
        score(["d"], ["s"], ["g"], [{}])
    assert math.isnan(rewards.verl_batch_score("m", missing="nan")(["d"], ["s"], ["g"], [{}])[0])


def test_easyr1_gets_the_score_and_those_of_a_panels_members(juror):
    score = rewards.easyr1_score("m")
    inputs = [{"response": "r", "ground_truth": "g", "x": 1}, {"response": "s", "ground_truth": "h"}]
    assert score(inputs, unknown=1) == [{"overall": 1.0}, {"overall": 2.0}]
    assert juror.asked[0] == ({"response": ["r", "s"], "ground_truth": ["g", "h"]}, 2)
    juror.parts = {"kind": [0.5, 0.25]}
    assert score(inputs) == [{"kind": 0.5, "overall": 1.0}, {"kind": 0.25, "overall": 2.0}]
    for lacks, parts in (((1,), {}), ((), {"kind": [0.5, LACKING]})):
        juror.lacks, juror.parts = lacks, parts
        with pytest.raises(RowFailed):
            score(inputs)


def test_ms_swift_gives_a_class_that_leaves_out_columns_that_are_no_rows(juror):
    reward = rewards.ms_swift_reward("m")("arguments", of="swift")
    assert reward(["x", "y"], solution=["a", "b"], pair=("c", "d"), short=["z"], word="ab") == [1.0, 2.0]
    assert juror.asked[0] == ({"completions": ["x", "y"], "solution": ["a", "b"], "pair": ("c", "d")}, 2)
    juror.lacks = (0,)
    with pytest.raises(RowFailed):
        reward(["x", "y"])


def test_areals_function_is_pickled_and_leaves_time_for_its_retries(juror):
    reward = rewards.areal_reward("m", inputs={"text": "completions"})
    assert pickle.loads(pickle.dumps(reward))._juror.arguments == {"timeout": 10.0, "inputs": {"text": "completions"}}
    assert rewards.areal_reward("m", timeout=3.0)._juror.arguments["timeout"] == 3.0
    assert reward("p", "c", [1], None, answer=7, none=None) == 1.0
    assert juror.asked[0] == ({"prompt": ["p"], "completions": ["c"], "prompt_ids": [[1]], "answer": [7]}, 1)
    juror.lacks = (0,)
    with pytest.raises(RowFailed):
        reward("p", "c")


def test_skyrls_environment_has_one_turn(juror, monkeypatch):
    base = ModuleType("skyrl_gym.envs.base_text_env")
    base.BaseTextEnv = type("BaseTextEnv", (), {"__init__": lambda self: setattr(self, "begun", True)})
    for name, module in (("skyrl_gym", ModuleType("skyrl_gym")), ("skyrl_gym.envs", ModuleType("skyrl_gym.envs"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, base.__name__, base)
    made = rewards.skyrl_env("m")
    env = made({"a": 1}, {"reward_spec": {"ground_truth": "g"}, "topic": "t", "none": None})
    assert env.begun and env.init("messages") == ("messages", {})
    assert env.step("r") == {"observations": [], "reward": 1.0, "done": True, "metadata": {}}
    assert juror.asked[0] == ({"topic": ["t"], "label": ["g"], "prompt": ["messages"], "response": ["r"]}, 1)
    made().step("r")
    assert juror.asked[-1] == ({"response": ["r"]}, 1)
    juror.lacks = (0,)
    with pytest.raises(RowFailed):
        env.step("r")


def test_openrlhf_gets_rewards_and_as_many_scores_of_its_own(juror):
    function = rewards.openrlhf_reward("m")
    answer = function(["q", "r"], ["p", "o"], [None, 1], unknown=1)
    assert answer == {"rewards": [1.0, 2.0], "scores": [1.0, 2.0], "extra_logs": {}}
    assert answer["rewards"] is not answer["scores"]
    assert juror.asked[0] == ({"queries": ["q", "r"], "prompts": ["p", "o"], "labels": [None, 1]}, 2)
    juror.lacks = (1,)
    with pytest.raises(RowFailed):
        function(["q", "r"], ["p", "o"], [None, 1])


def test_slime_gets_a_number_for_a_sample_and_a_list_for_a_list(juror):
    reward = rewards.slime_reward("m")

    def sample(response, **metadata):
        return SimpleNamespace(prompt="p", response=response, label="l", metadata=metadata or None)

    assert called(reward, None, sample("r", topic="t"), unknown=1) == 1.0
    assert juror.asked[0] == ({"topic": ["t"], "prompt": ["p"], "response": ["r"], "label": ["l"]}, 1)
    assert called(reward, None, [sample("r", topic="t", prompt="other"), sample("s")]) == [1.0, 2.0]
    assert juror.asked[1] == ({"prompt": ["p", "p"], "response": ["r", "s"], "label": ["l", "l"]}, 2)
    assert called(reward, None, []) == [] and len(juror.asked) == 2
    assert called(reward, None, SimpleNamespace(prompt="p", response="r", label=None)) == 1.0
    juror.lacks = (0,)
    with pytest.raises(RowFailed):
        called(reward, None, sample("r"))


class Steps(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, render_mode=None, named=False):
        self.render_mode, self.named = render_mode, named

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        observation = np.full(2, action, np.float32)
        return {"x": observation, "y": 7} if self.named else observation, 0.25, False, True, {"own": 1}

    def render(self):
        return "a frame"


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("mode", [None, "rgb_array", "human"])
def test_a_step_of_gymnasium_is_rewarded_by_its_score(juror, mode, named):
    env = rewards.gymnasium_reward(Steps(mode, named), "m")
    observation, reward, terminated, truncated, info = env.step(2)
    assert (reward, terminated, truncated, info) == (1.0, False, True, {"own": 1, "environment_reward": 0.25})
    columns, n = juror.asked[0]
    assert n == 1 and columns["observation"] == [observation] and columns["action"] == [2]
    assert columns.get("frame") == (["a frame"] if mode == "rgb_array" else None)
    assert columns.get("y") == ([7] if named else None) and ("x" in columns) == named
    juror.lacks = (0,)
    with pytest.raises(RowFailed):
        env.step(1)
    _, reward, _, _, info = rewards.gymnasium_reward(Steps(mode, named), "m", missing="nan").step(1)
    assert math.isnan(reward) and info["reward_missing"] == LACKING


class Vector:
    """What VecEnvWrapper needs of a VecEnv, of three environments of which the second's episode has ended."""

    num_envs, observation_space, action_space, render_mode = 3, Steps.observation_space, Steps.action_space, None

    def __init__(self, named):
        self.named = named

    def reset(self):
        return "first"

    def step_wait(self):
        rows = np.arange(6, dtype=np.float32).reshape(3, 2)
        observations = {"x": rows, "y": rows[:, 0]} if self.named else rows
        last = {"x": np.float32([9, 9]), "y": 9} if self.named else np.float32([9, 9])
        return observations, [0.5, 1.5, 2.5], [False, True, True], [{}, {"terminal_observation": last}, {}]


@pytest.mark.parametrize("named", [False, True])
def test_environments_of_stable_baselines_are_scored_in_one_request_and_at_their_end_by_its_observation(juror, named):
    pytest.importorskip("stable_baselines3")
    env = rewards.sb3_reward(Vector(named), "m")
    assert env.reset() == "first"
    observations, given, dones, infos = env.step_wait()
    assert given.tolist() == [1, 2, 3] and given.dtype == np.float32 and dones == [False, True, True]
    assert [info["environment_reward"] for info in infos] == [0.5, 1.5, 2.5]
    ((columns, n),) = juror.asked
    seen = columns["x"] if named else columns["observation"]
    assert n == 3 and np.stack(seen).tolist() == [[0, 1], [9, 9], [4, 5]]
    assert not any("reward_missing" in info for info in infos) and observations is not None


@pytest.mark.parametrize("missing", ["raise", "nan"])
def test_what_float32_does_not_hold_is_missing_for_stable_baselines(juror, missing):
    pytest.importorskip("stable_baselines3")
    most = float(np.finfo(np.float32).max)
    env = rewards.sb3_reward(Vector(False), "m", missing=missing)
    juror.scored = [-most, most, 0.0]
    assert env.step_wait()[1].tolist() == [-most, most, 0.0]
    juror.scored = [-1e39, LACKING, 1e39]
    if missing == "raise":
        with pytest.raises(RowFailed, match="3 of 3 rewards of 'm' are missing; the first: the score is -1e"):
            env.step_wait()
        return
    _, given, _, infos = env.step_wait()
    assert np.isnan(given).all() and [info["reward_missing"][:12] for info in infos] == [
        "the score is",
        LACKING[:12],
        "the score is",
    ]
