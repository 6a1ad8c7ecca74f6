"""The policy of a model of Stable-Baselines3, from the environment's own observation: played, served and exported.

The model is made anew by the function that made it for the training, so policies and feature extractors of one's own
are what they were. Nothing is unpickled: weights are those that the training published.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.vec_env import VecCheckNan, VecMonitor, VecNormalize, VecTransposeImage
from stable_baselines3.common.vec_env.base_vec_env import VecEnvWrapper
from stable_baselines3.dqn.policies import DQNPolicy
from stable_baselines3.sac.policies import SACPolicy
from torch import Tensor, nn

from jurybox.training.environments.gymnasium_env import Actions, Observations
from jurybox.training.environments.making import EnvironmentUnusable

_SEEN_THROUGH = (VecTransposeImage, VecNormalize, VecMonitor, VecCheckNan)  # what they do to observations is done here
_ACTS = ("_predict", "get_distribution", "_get_action_dist_from_latent")  # methods that `_computed` stands for


class CannotAct(ValueError):
    """A model's policy cannot be described, so it can be trained, but not played, served or exported."""


class ActingPolicy(nn.Module):
    """Maps observations of the environment to what an action is chosen from, as ``model.predict`` does, deterministic.

    Pictures are transposed and divided by 255, categories are one-hot, and what VecNormalize normalises is normalised
    with the statistics that are part of the weights, in float64.

    Args:
        model: with its environments.

    Attributes:
        inputs: the observation's parts.
        acts: how an action is chosen from the output, as arguments of `Acts`.
        outputs: shape of a row of each output.

    Raises:
        CannotAct: an observation or action is of a kind that no policy here has, a wrapper changes observations in a
            way of its own, or the policy remembers.
    """

    def __init__(self, model: BaseAlgorithm) -> None:
        super().__init__()
        assert model.env is not None
        self.policy: Any = model.policy
        if hasattr(self.policy, "lstm_actor"):
            raise CannotAct("its policy is recurrent, and would need the memory of each episode")
        own, wrapper = model.env, model.get_vec_normalize_env()
        while isinstance(own, VecEnvWrapper):
            if not isinstance(own, _SEEN_THROUGH):
                raise CannotAct(
                    f"{type(own).__name__} is between environment and model: expected none but "
                    f"{', '.join(each.__name__ for each in _SEEN_THROUGH)}; put it into the environment as a wrapper"
                )
            own = own.venv
        try:
            self.inputs = Observations(own.observation_space).seen.inputs
            action = Actions(own.action_space).spec
        except EnvironmentUnusable as error:
            raise CannotAct(str(error)) from error
        seen = self.policy.observation_space
        self._keyed = isinstance(seen, spaces.Dict)
        parts = seen.spaces if isinstance(seen, spaces.Dict) else {self.inputs[0].name: seen}
        if parts.keys() != {leaf.name for leaf in self.inputs}:
            raise CannotAct(f"its observation {own.observation_space} has nested or empty parts")
        self._transposed = {leaf.name for leaf in self.inputs if leaf.shape != parts[leaf.name].shape}
        self._normalised: dict[str, Any] = {}
        if wrapper is not None and wrapper.norm_obs:
            keys = wrapper.norm_obs_keys or [self.inputs[0].name]
            self._normalised = {name: wrapper.obs_rms[name] if self._keyed else wrapper.obs_rms for name in keys}
            self._epsilon, self._clip = wrapper.epsilon, wrapper.clip_obs
        for number, found in enumerate(self._normalised.values()):
            for name in ("mean", "var", "count"):
                self.register_buffer(f"{name}_{number}", torch.as_tensor(getattr(found, name), dtype=torch.float64))
        self._space = own.action_space
        kind = type(self.policy)
        self._plain = isinstance(self.policy, ActorCriticPolicy)
        for known in (ActorCriticPolicy, SACPolicy, DQNPolicy):
            changed = [
                each for each in _ACTS if hasattr(known, each) and getattr(kind, each, 0) is not getattr(known, each)
            ]
            if isinstance(self.policy, known) and changed:
                raise CannotAct(f"{kind.__name__} chooses actions in its own way ({', '.join(changed)})")
        if isinstance(self._space, spaces.Box):
            bounds = ([bound if math.isfinite(bound) else None for bound in side] for side in (action.low, action.high))
            low, high = bounds
            choose = "box" if self.policy.squash_output else "clip"
            self.acts: dict[str, Any] = {"output": "action", "choose": choose, "low": low, "high": high}
            self.outputs = {"action": (action.size,)}
        else:
            name = "values" if hasattr(self.policy, "q_net") else "logits"
            self.acts = {"output": name, "choose": "best", "counts": action.counts}
            self.acts["starts"] = [0] * len(action.counts)  # Stable-Baselines3 tells environments no others
            self.outputs = {name: (action.size,)}

    def forward(self, *observation: Tensor) -> Tensor:
        """Compute n observations, the parts in the order of `inputs`; returns float32 (n, size of the output)."""
        seen: Any = {}
        for leaf, given in zip(self.inputs, observation, strict=True):
            seen[leaf.name] = given.permute(0, 3, 1, 2) if leaf.name in self._transposed else given
        for number, name in enumerate(self._normalised):
            mean, var = self.get_buffer(f"mean_{number}"), self.get_buffer(f"var_{number}")
            found = (seen[name].double() - mean) / (var + self._epsilon).sqrt()
            seen[name] = found.clamp(-self._clip, self._clip).float()
        return self._computed(seen if self._keyed else seen[self.inputs[0].name]).float()

    def _computed(self, seen: Any) -> Tensor:
        policy, space = self.policy, self._space
        if hasattr(policy, "q_net"):
            values: Tensor = policy.q_net(seen)
            return values
        if isinstance(policy, SACPolicy):
            mean: Tensor = policy.actor.get_action_dist_params(seen)[0]
            return mean.tanh().flatten(1)
        if not self._plain:
            action = policy(seen, deterministic=True)
            action = action[0] if isinstance(action, tuple) else action  # of an actor and a critic
            return action.flatten(1) if isinstance(space, spaces.Box) else _one_hot(action, space)
        # Without its distribution, which torch.export cannot trace: the mode is the mean, or the largest logit.
        features = BasePolicy.extract_features(policy, seen, policy.pi_features_extractor)
        found: Tensor = policy.action_net(policy.mlp_extractor.forward_actor(features))
        if isinstance(space, spaces.MultiBinary):  # a bit is a choice of two, 0 where both are as likely
            return torch.stack((torch.zeros_like(found), found), -1).flatten(1)
        return found.tanh() if policy.squash_output else found

    def remember_statistics(self) -> None:
        """Take those of the environments, which went on."""
        for number, found in enumerate(self._normalised.values()):
            for name in ("mean", "var", "count"):
                self.get_buffer(f"{name}_{number}").copy_(torch.as_tensor(getattr(found, name), dtype=torch.float64))

    def tell_statistics(self) -> None:
        """Give them to the environments, which were made anew."""
        for number, found in enumerate(self._normalised.values()):
            found.mean, found.var = (self.get_buffer(f"{name}_{number}").numpy().copy() for name in ("mean", "var"))
            found.count = float(self.get_buffer(f"count_{number}"))


def _one_hot(actions: Tensor, space: spaces.Space[Any]) -> Tensor:
    """What has its largest values at the actions of a policy that tells no values."""
    if isinstance(space, spaces.Discrete):
        return nn.functional.one_hot(actions.long(), int(space.n))
    counts = space.nvec.ravel().tolist() if isinstance(space, spaces.MultiDiscrete) else [2] * actions[0].numel()
    flat = actions.flatten(1).long()
    return torch.cat([nn.functional.one_hot(flat[:, i], count) for i, count in enumerate(counts)], 1)
