"""Any model of Stable-Baselines3 as a `Trainer`: its own loop collects and learns, the run does everything else.

The loop is ``model.learn``, left at the beginning of every rollout but the first, where nothing of the model is under
way. So one step is one rollout and its update, whatever the algorithm is, and schedules see the whole budget.

Nothing is unpickled: a resumed model is made anew, and takes arrays from the checkpoint. The episodes that were going
on are not in it: a resumed run begins new ones.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from jurybox.protocol.weights.reader import WeightsReader
from jurybox.training.algorithms.torch_states import as_tensors
from jurybox.training.checkpoints import CheckpointError
from jurybox.training.runtime.plan import PlanError
from jurybox.training.runtime.role_context import Made, RoleContext, Trainer
from jurybox.training.spaces import check_finite

POLICY = "policy"  # the weights channel
# Stable-Baselines3's names of what an update reports, where ours are others.
_NAMES = {"policy_gradient_loss": "policy_loss", "approx_kl": "approximate_kl", "std": "action_deviation"}
LEARNER_COLUMNS = (
    "learning_rate",
    "policy_loss",
    "value_loss",
    "explained_variance",
    "approximate_kl",
    "clip_fraction",
)


class SB3Trainer(Trainer):
    """Trains a model of Stable-Baselines3.

    Args:
        model: with its environments, which are closed with the role.
        steps: environment steps that a step makes at least, where a rollout is shorter.

    Attributes:
        cut: episodes that ended because their worker was replaced (``info["restarted"]``); no other counter has them.

    Raises:
        PlanError: it is no such model, or has no environment.
    """

    def __init__(self, context: RoleContext, model: BaseAlgorithm, *, steps: int = 1) -> None:
        super().__init__(context)
        if not isinstance(model, BaseAlgorithm) or model.env is None:
            raise PlanError(
                f"{context.name}: expected a model of Stable-Baselines3 that has an environment, got {type(model)}"
            )
        self.model, self.environments = model, model.env
        self.cut = 0
        self._least = steps
        self._begun = False
        self._sums = np.zeros(self.environments.num_envs)
        self._lengths = np.zeros(self.environments.num_envs, np.int64)
        model.set_logger(Logger(None, []))

    def begin(self) -> None:
        """What comes before the first step of a run that is not resumed."""

    def network(self) -> torch.nn.Module:
        """What is published; the whole policy of the model by default."""
        return self.model.policy

    def ended(self, info: Mapping[str, Any], total: float) -> None:
        """Take the last info of an episode, with its return."""

    def numbers(self) -> dict[str, float]:
        """Numbers about the step that ended, beside those of its update."""
        return {}

    def step(self) -> Made:
        model, before, learned = self.model, self.model.num_timesteps, gradient_steps(self.model)
        if not self._begun:
            self._begun = True
            self.begin()
        # What is left of the run, not of this step: schedules go by it.
        left = max(1, self.context.plan.budget.steps - before)
        rollout: Any = _Rollout(self, before, self._least)
        with suppress(_Enough):
            model.learn(left, rollout, log_interval=None, reset_num_timesteps=False)  # type: ignore[arg-type]
        values = model.logger.name_to_value
        found = {name.removeprefix("train/"): value for name, value in values.items() if name.startswith("train/")}
        self.context.metrics(
            **{_NAMES.get(name, name): float(value) for name, value in found.items()}, **self.numbers()
        )
        model.logger.dump(model.num_timesteps)  # forgets the values; the logger has no outputs
        return Made(model.num_timesteps - before, gradient_steps(model) - learned)

    def moved(self, rewards: Any, dones: Any, infos: Sequence[Mapping[str, Any]], env_steps: int) -> bool:
        """Count a step of all environments; returns whether the rollout goes on."""
        check_finite(rewards, "a reward")
        self._sums += rewards
        self._lengths += 1
        for index in np.flatnonzero(dones).tolist():
            info, total, length = infos[index], float(self._sums[index]), int(self._lengths[index])
            self._sums[index] = self._lengths[index] = 0
            if info.get("restarted"):
                self.cut += 1
                continue
            if "episode" in info:  # of a Monitor: the environment's own, before any normalisation
                total, length = float(info["episode"]["r"]), int(info["episode"]["l"])
            self.context.episode(total=total, length=length)
            self.ended(info, total)
        return self.context.goes_on(env_steps)

    def publication(self) -> tuple[Any, dict[str, Any] | None]:
        return self.network(), None

    def adopt(self, published: WeightsReader) -> None:
        self.network().load_state_dict(as_tensors(published.read().state))
        self._begun = True
        self.model.num_timesteps = self.context.own_steps  # a predecessor's count, whose rollouts are gone

    def save(self) -> dict[str, Any]:
        model = self.model
        parameters = {name: _portable(state) for name, state in _states(model).items()}
        variables = {name: value.detach() for name, value in _variables(model).items()}
        return {
            "env_steps": model.num_timesteps,
            "updates": getattr(model, "_n_updates", 0),
            "parameters": parameters,
            "variables": variables,
            "replay": _rows_of(getattr(model, "replay_buffer", None)),
            "normalised": {name: vars(each) for name, each in _statistics(model).items()},
            "random": _random_states(self.environments),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        model = self.model
        self._begun = True
        # The model's constructor gave its environments seeds, which their first reset uses up.
        self.environments.reset()
        try:
            states: Any = {name: _loadable(each, _states(model)[name]) for name, each in state["parameters"].items()}
            model.set_parameters(states, device=model.device)
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint of {self.context.name} is of another network than this model's: resume the run with "
                f"the build and the settings that began it, or start anew in another folder ({error})"
            ) from error
        for name, value in as_tensors(state["variables"]).items():
            _variables(model)[name].data.copy_(value)
        _restore_rows(getattr(model, "replay_buffer", None), state["replay"])
        for name, each in state["normalised"].items():
            vars(_statistics(model)[name]).update(each)
        model.num_timesteps, model._n_updates = state["env_steps"], state["updates"]
        if self.context.life == 1:  # who comes after a killed one does not repeat its random numbers
            _restore_random_states(state["random"], self.environments, self.context.seed + model.num_timesteps)

    def close(self) -> None:
        self.environments.close()


class _Enough(Exception):
    """A step has made its rollouts."""


class _Rollout(BaseCallback):
    """Hands what happens in a rollout to the trainer, and ends the loop where the next one would begin."""

    def __init__(self, trainer: SB3Trainer, before: int, least: int) -> None:
        super().__init__()
        self._trainer, self._before, self._least = trainer, before, least

    def _on_rollout_start(self) -> None:
        if self.model.num_timesteps - self._before >= self._least:
            raise _Enough

    def _on_step(self) -> bool:
        told = self.locals
        return self._trainer.moved(told["rewards"], told["dones"], told["infos"], self.num_timesteps - self._before)


def gradient_steps(model: BaseAlgorithm) -> int:
    """Optimiser steps of a model so far, which its optimisers count; of several optimisers, those of the busiest."""
    states = (state["state"] for name, state in _states(model).items() if name.endswith("optimizer"))
    return max((int(each["step"]) for state in states for each in state.values() if "step" in each), default=0)


def _states(model: BaseAlgorithm) -> dict[str, dict[str, Any]]:
    """The states of a model's modules and optimisers, by name."""
    found: Any = model.get_parameters()  # annotated as holding modules
    return dict(found)


def _portable(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state_dict as a checkpoint holds it: of an optimiser without its settings, by numbers as strings."""
    return (
        {str(number): dict(each) for number, each in state["state"].items()} if "param_groups" in state else {**state}
    )


def _loadable(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    tensors = as_tensors(state)
    if "param_groups" not in own:
        return dict(tensors)
    return {**own, "state": {int(number): each for number, each in tensors.items()}}


def _variables(model: BaseAlgorithm) -> dict[str, torch.Tensor]:
    """Tensors of a model beside its modules and optimisers, such as SAC's entropy coefficient."""
    found: dict[str, torch.Tensor] = {}
    for path in model._get_torch_save_params()[1]:  # what its own `save` takes; there is no public way to ask
        value: Any = model
        for part in path.split("."):
            value = getattr(value, part)
        if value is not None:
            found[path] = value
    return found


def _statistics(model: BaseAlgorithm) -> dict[str, Any]:
    """Running means and variances of VecNormalize, by name; none without it."""
    wrapper = model.get_vec_normalize_env()
    if wrapper is None:
        return {}
    seen = wrapper.obs_rms if wrapper.norm_obs else {}
    parts = {f"observation.{name}": each for name, each in seen.items()} if isinstance(seen, dict) else {"seen": seen}
    return {**parts, "return": wrapper.ret_rms}


def _arrays(buffer: Any) -> dict[str, Any]:
    """The arrays of a replay buffer by name; of parts by name, as for Dict observations, a dict."""

    def held(value: Any) -> bool:
        parts = list(value.values()) if isinstance(value, dict) else [value]
        return bool(parts) and all(isinstance(part, np.ndarray) and part.dtype != object for part in parts)

    return {name: value for name, value in vars(buffer).items() if held(value)}


def _rows_of(buffer: Any) -> dict[str, Any] | None:
    if buffer is None:
        return None
    size = buffer.size()
    arrays = {
        name: {part: each[:size] for part, each in value.items()} if isinstance(value, dict) else value[:size]
        for name, value in _arrays(buffer).items()
    }
    return {"arrays": arrays, "pos": buffer.pos, "full": buffer.full}


def _restore_rows(buffer: Any, state: Mapping[str, Any] | None) -> None:
    if buffer is None or state is None:
        return
    for name, value in _arrays(buffer).items():
        for own, kept in (
            ((value[part], each) for part, each in state["arrays"][name].items())
            if isinstance(value, dict)
            else ((value, state["arrays"][name]),)
        ):
            own[: len(kept)] = kept
    buffer.pos, buffer.full = state["pos"], state["full"]


def _random_states(environments: VecEnv) -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys), *rest],
        "torch": torch.get_rng_state(),
        "environments": [generator.bit_generator.state for generator in environments.get_attr("np_random")],
    }


def _restore_random_states(states: Mapping[str, Any], environments: VecEnv, fresh_seed: int) -> None:
    """Restore the global generators and the environments'; more environments than there were get fresh ones."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys, position, has_gauss, cached))
    torch.set_rng_state(as_tensors(states["torch"]))
    for index in range(environments.num_envs):
        generator = np.random.default_rng((fresh_seed, index))
        if index < len(states["environments"]):
            generator.bit_generator.state = states["environments"][index]
        environments.set_attr("np_random", generator, indices=[index])
