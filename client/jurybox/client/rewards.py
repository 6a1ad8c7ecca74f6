"""Rewards for trainers that call a Python function: TRL, verl, OpenRLHF, slime, EasyR1, Gymnasium and others.

A trainer's package is imported only when its hook is used. A missing reward is never a number: each hook returns the
value that its trainer skips, and raises if the trainer has no such value.

Concurrent calls, from tasks of an event loop or from threads, are sent to the server together. If several engines
compute the model, they share the rows, also those of a single call.

A model argument may also be the name of a panel in the server's configuration, or a mapping of names to weights. The
members of a panel are called concurrently, and a row for which any member has no score has no score.

Example:
    from jurybox.client.rewards import trl_reward

    helpful = trl_reward("helpfulness", inputs={"text": "completions", "prompt": "prompts"})
    GRPOTrainer(model, reward_funcs=[helpful], ...)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jurybox.client.juror import Juror, Members, Scored
from jurybox.protocol.errors import RowFailed

if TYPE_CHECKING:
    import gymnasium

__all__ = [
    "Juror", "areal_reward", "easyr1_score", "gymnasium_reward", "ms_swift_reward", "openrlhf_reward", "sb3_reward",
    "skyrl_env", "slime_reward", "trl_reward", "verl_batch_score", "verl_score",
]  # fmt: skip

Missing = Literal["raise", "nan"]
_LOG = logging.getLogger("jurybox.rewards")
_MOST = float(np.finfo(np.float32).max)


def _numbers(name: str, scored: list[Scored], missing: Missing = "raise") -> list[float]:
    """Return the scores. If some are missing, raise RowFailed, or return NaN for them with missing="nan"."""
    reasons = [score for score in scored if isinstance(score, str)]
    if reasons and missing == "raise":
        raise RowFailed(f"{len(reasons)} of {len(scored)} rewards of {name!r} are missing; the first: {reasons[0]}")
    _tell(name, reasons, len(scored))
    return [math.nan if isinstance(score, str) else score for score in scored]


def _tell(name: str, reasons: list[str], n: int) -> None:
    if reasons:
        _LOG.warning("%d of %d rewards of %r are missing; the first: %s", len(reasons), n, name, reasons[0])


# ----
# One hook for each trainer. `juror` holds the arguments of Juror.


def trl_reward(model: str | Members, *, name: str = "", asynchronous: bool = False, **juror: Any) -> Callable[..., Any]:
    """Return a function for TRL's ``reward_funcs``. A missing reward is None, which TRL ignores.

    The columns are `prompts`, `completions` and those of the dataset.

    Args:
        model: see Juror.
        name: the function's name in TRL's logs; default: the model's name.
        asynchronous: return an ``async def`` function: TRL runs all such functions concurrently.
        juror: arguments of Juror.

    Returns:
        ``f(prompts, completions, **columns) -> list[float | None]``.
    """
    asks = Juror(model, **juror)

    def given(scored: list[Scored]) -> list[float | None]:
        _tell(asks.name, [score for score in scored if isinstance(score, str)], len(scored))
        return [None if isinstance(score, str) else score for score in scored]

    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return given(asks.scores({"completions": completions, **columns}, len(completions)))

    async def reward_async(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return given(await asks.scores_async({"completions": completions, **columns}, len(completions)))

    function: Callable[..., Any] = reward_async if asynchronous else reward
    function.__name__ = name or asks.name.replace("/", "_")
    return function


def verl_score(
    model: str | Members, *, asynchronous: bool = True, missing: Missing = "raise", **juror: Any
) -> Callable[..., Any]:
    """Return a ``compute_score`` for verl and verl-omni. A worker's concurrent calls are sent together.

    The columns are verl's keywords (solution_str or solution_image, ground_truth, data_source) and the entries of
    extra_info.

    Args:
        model: see Juror.
        asynchronous: False for reward managers that call plain functions.
        missing: verl does not support missing scores. "raise" stops the run; "nan" returns NaN, which the caller must
            handle.
        juror: arguments of Juror.

    Example:
        compute_score = verl_score("helpfulness")  # in the file given by reward.custom_reward_function.path
    """
    asks = Juror(model, **juror)

    def columns(given: dict[str, Any]) -> dict[str, Any]:
        merged = {**(given.get("extra_info") or {}), **given}
        return {key: [value] for key, value in merged.items() if value is not None}

    async def compute_score(**given: Any) -> float:
        return _numbers(asks.name, await asks.scores_async(columns(given), 1), missing)[0]

    def compute_score_now(**given: Any) -> float:
        return _numbers(asks.name, asks.scores(columns(given), 1), missing)[0]

    return compute_score if asynchronous else compute_score_now


def verl_batch_score(model: str | Members, *, missing: Missing = "raise", **juror: Any) -> Callable[..., list[float]]:
    """Return a ``compute_score`` for verl's reward manager `batch`, which scores a whole batch in one call.

    The columns are `data_sources`, `solution_strs`, `ground_truths`, the same in the singular, and the entries that all
    dicts of `extra_infos` have.

    Args:
        model, missing, juror: as for `verl_score`.
    """
    asks = Juror(model, **juror)

    def compute_score(
        data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any, **_: Any
    ) -> list[float]:
        given = {"data_source": data_sources, "solution_str": solution_strs, "ground_truth": ground_truths}
        columns = {**_columns([one or {} for one in extra_infos]), **given}
        columns |= {f"{name}s": values for name, values in given.items()}
        return _numbers(asks.name, asks.scores(columns, len(solution_strs)), missing)

    return compute_score


def easyr1_score(model: str | Members, **juror: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, float]]]:
    """Return a ``compute_score`` for EasyR1's batches. A missing reward raises: EasyR1 handles no other.

    Each answer is ``{"overall": score}``, with the scores of a panel's members by their names.

    Args:
        model: see Juror.
        juror: arguments of Juror; the columns are the keys that all inputs have: response, ground_truth and others.

    Example:
        REWARD_NAME, REWARD_TYPE = "helpfulness", "batch"  # in the file given by worker.reward.reward_function
        compute_score = easyr1_score("helpfulness")
    """
    asks = Juror(model, **juror)

    def compute_score(reward_inputs: list[dict[str, Any]], **_: Any) -> list[dict[str, float]]:
        scored = asks.scores(_columns(reward_inputs), len(reward_inputs))
        parts = {name: _numbers(name, list(part)) for name, part in scored.parts.items()}
        return [
            {**{name: part[i] for name, part in parts.items()}, "overall": score}
            for i, score in enumerate(_numbers(asks.name, list(scored)))
        ]

    return compute_score


def ms_swift_reward(model: str | Members, **juror: Any) -> type:
    """Return a class for ms-swift's ``orms``. A missing reward raises, which stops the run.

    Args:
        model: see Juror.
        juror: arguments of Juror; the columns are completions and those of the dataset.

    Example:
        from swift.rewards import orms  # in the file given by --external_plugins

        orms["helpfulness"] = ms_swift_reward("helpfulness", inputs={"text": "completions"})
    """
    asks = Juror(model, **juror)

    class JurorReward:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
            n = len(completions)
            fitting = {name: one for name, one in columns.items() if isinstance(one, (list, tuple)) and len(one) == n}
            return _numbers(asks.name, asks.scores({**fitting, "completions": completions}, n))

    return JurorReward


def areal_reward(model: str | Members, **juror: Any) -> Callable[..., float]:
    """Return a ``reward_fn`` for AReaL, which runs it in a pool of processes. A missing reward raises.

    It can be pickled, and connects in the process that calls it. AReaL ends a call after 15 s: a smaller `timeout` of
    the juror leaves time for its retries.

    Args:
        model: see Juror.
        juror: arguments of Juror; the columns are prompt, completions, prompt_ids, completion_ids and those of the
            dataset.
    """
    return _ArealReward(Juror(model, **{"timeout": 10.0, **juror}))


class _ArealReward:
    def __init__(self, juror: Juror) -> None:
        self._juror = juror

    def __call__(
        self, prompt: Any, completions: Any, prompt_ids: Any = None, completion_ids: Any = None, **columns: Any
    ) -> float:
        columns |= {"prompt": prompt, "completions": completions}
        columns |= {"prompt_ids": prompt_ids, "completion_ids": completion_ids}
        row = {name: [value] for name, value in columns.items() if value is not None}
        return _numbers(self._juror.name, self._juror.scores(row, 1))[0]


def skyrl_env(model: str | Members, **juror: Any) -> type:
    """Return an environment of one turn for SkyRL-gym, whose reward is the juror's score. A missing reward raises.

    Args:
        model: see Juror.
        juror: arguments of Juror; the columns are prompt (the messages), response, label (the `ground_truth` of the
            row's reward_spec) and the row's other entries.

    Example:
        HelpfulEnv = skyrl_env("helpfulness", inputs={"text": "response"})  # in my_envs.py
        skyrl_gym.register(id="helpful", entry_point="my_envs:HelpfulEnv")
    """
    from skyrl_gym.envs.base_text_env import BaseTextEnv

    asks = Juror(model, **juror)

    class JurorEnv(BaseTextEnv):  # type: ignore[misc]
        def __init__(self, env_config: Any = None, extras: Any = None) -> None:
            super().__init__()
            row = dict(extras or {})
            spec = row.pop("reward_spec", None) or {}
            self._row = {**row, "label": spec.get("ground_truth")}

        def init(self, prompt: Any) -> tuple[Any, dict[str, Any]]:
            self._row["prompt"] = prompt
            return prompt, {}

        def step(self, action: str) -> dict[str, Any]:
            given = {name: [value] for name, value in {**self._row, "response": action}.items() if value is not None}
            reward = _numbers(asks.name, asks.scores(given, 1))[0]
            return {"observations": [], "reward": reward, "done": True, "metadata": {}}

    return JurorEnv


def openrlhf_reward(model: str | Members, **juror: Any) -> Callable[..., dict[str, Any]]:
    """Return a ``reward_func`` for the file given by OpenRLHF's ``--reward.remote_url``.

    Concurrent calls of its threads are sent together. A missing reward raises; OpenRLHF logs the error and keeps
    the sample with reward None. `scores` equals `rewards`.

    Args:
        model: see Juror.
        juror: arguments of Juror; the columns are queries (prompt and answer), prompts and labels.
    """
    asks = Juror(model, **juror)

    def reward_func(queries: list[str], prompts: list[str], labels: list[Any], **_: Any) -> dict[str, Any]:
        given = {"queries": queries, "prompts": prompts, "labels": labels}
        rewards = _numbers(asks.name, asks.scores(given, len(queries)))
        return {"rewards": rewards, "scores": list(rewards), "extra_logs": {}}

    return reward_func


def slime_reward(model: str | Members, **juror: Any) -> Callable[..., Any]:
    """Return a function for slime's ``--custom-rm-path``, for one sample or a list. A missing reward raises.

    Args:
        model: see Juror.
        juror: arguments of Juror; the columns are prompt, response, label and the entries of a sample's metadata.
    """
    asks = Juror(model, **juror)

    async def custom_rm(_arguments: Any, sample: Any, **_: Any) -> Any:
        samples = sample if isinstance(sample, list) else [sample]
        rows = [
            {
                **(getattr(one, "metadata", None) or {}),
                **{key: getattr(one, key) for key in ("prompt", "response", "label")},
            }
            for one in samples
        ]
        rewards = _numbers(asks.name, await asks.scores_async(_columns(rows), len(samples)) if samples else [])
        return rewards if isinstance(sample, list) else rewards[0]

    return custom_rm


def gymnasium_reward(
    env: gymnasium.Env[Any, Any], model: str | Members, *, missing: Missing = "raise", **juror: Any
) -> gymnasium.Env[Any, Any]:
    """Wrap an environment so that its reward is the juror's score; its own reward is info["environment_reward"].

    Args:
        env: the environment.
        model: see Juror.
        missing: "raise"; or "nan" to return NaN with the reason in info["reward_missing"], so that the caller can skip
            such steps.
        juror: arguments of Juror. The columns are observation (and the keys of a dict observation), action, and, if the
            render mode is "rgb_array", frame, the result of `render`.

    Example:
        env = gymnasium_reward(env, "photo", inputs={"image": "observation"})
    """
    import gymnasium

    asks = Juror(model, **juror)

    class JurorReward(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
            observation, own, terminated, truncated, info = self.env.step(action)
            columns = _columns_of([observation], {"action": [action]})
            if self.env.render_mode == "rgb_array":
                columns["frame"] = [self.env.render()]
            scored = asks.scores(columns, 1)
            info = {**info, "environment_reward": own}
            if isinstance(scored[0], str):
                info["reward_missing"] = scored[0]
            return observation, _numbers(asks.name, scored, missing)[0], terminated, truncated, info

    return JurorReward(env)


def sb3_reward(venv: Any, model: str | Members, *, missing: Missing = "raise", **juror: Any) -> Any:
    """Like `gymnasium_reward`, for a VecEnv of Stable-Baselines3. All environments are scored in one request.

    At the end of an episode its terminal observation is scored, not the first observation of the next episode.

    Args:
        venv: the vectorized environment.
        model: see Juror.
        missing: see `gymnasium_reward`.
        juror: arguments of Juror. The columns are observation and the keys of a dict observation.

    Example:
        model = PPO("CnnPolicy", sb3_reward(venv, "photo", inputs={"image": "observation"}))
    """
    from stable_baselines3.common.vec_env import VecEnvWrapper

    asks = Juror(model, **juror)

    class JurorRewards(VecEnvWrapper):
        def reset(self) -> Any:
            return self.venv.reset()

        def step_wait(self) -> Any:
            observations, own, dones, infos = self.venv.step_wait()
            n = len(own)
            rows = [
                infos[i]["terminal_observation"]
                if dones[i] and "terminal_observation" in infos[i]
                else {key: value[i] for key, value in observations.items()}
                if isinstance(observations, dict)
                else observations[i]
                for i in range(n)
            ]
            scored = [
                score
                if isinstance(score, str) or abs(score) <= _MOST
                else f"the score is {score}, more than the float32 of a VecEnv's rewards holds"
                for score in asks.scores(_columns_of(rows, {}), n)
            ]
            for info, reward, score in zip(infos, own, scored, strict=True):
                info["environment_reward"] = float(reward)
                if isinstance(score, str):
                    info["reward_missing"] = score
            return observations, np.array(_numbers(asks.name, scored, missing), np.float32), dones, infos

    return JurorRewards(venv)


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the columns that all rows have."""
    names = set.intersection(*(set(row) for row in rows)) if rows else set()
    return {key: [row[key] for row in rows] for key in names}


def _columns_of(observations: list[Any], more: dict[str, Any]) -> dict[str, Any]:
    columns = {"observation": observations, **more}
    if isinstance(observations[0], dict):
        columns |= {key: [row[key] for row in observations] for key in observations[0]}
    return columns
