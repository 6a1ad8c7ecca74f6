"""Any model of Stable-Baselines3 in a plan: trained by its own loop, then played, served and exported.

``jurybox train plan --plan jurybox.training.trainings.sb3:plan``, see docs/plans.md. The model is made by a function of
the user's, for the training and wherever its policy acts; nothing is unpickled.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import gymnasium
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from jurybox.protocol import TensorSpec
from jurybox.protocol.weights import WeightsLayout
from jurybox.protocol.weights.reader import WeightsReader
from jurybox.server.models import ServedModel
from jurybox.training.policies import Acts, Description
from jurybox.training.roles.sb3 import LEARNER_COLUMNS, POLICY, SB3Trainer
from jurybox.training.roles.sb3_policy import ActingPolicy, CannotAct
from jurybox.training.runtime.plan import Budget, ChannelSpec, Kind, Plan, PlanError, RoleSpec, load
from jurybox.training.runtime.role_context import RoleContext


class PlayedTrainer(SB3Trainer):
    """Publishes a policy with the statistics of VecNormalize, where the model's policy can be played."""

    def __init__(self, context: RoleContext, model: BaseAlgorithm, *, steps: int = 1) -> None:
        super().__init__(context, model, steps=steps)
        self._acting: ActingPolicy | None = None
        try:
            self._acting = ActingPolicy(model)
        except CannotAct as error:
            context.say(f"the policy cannot be played, served or exported: {error}")

    def network(self) -> torch.nn.Module:
        return self.model.policy if self._acting is None else self._acting

    def publication(self) -> tuple[Any, dict[str, Any] | None]:
        if self._acting is not None:
            self._acting.remember_statistics()
        return super().publication()

    def adopt(self, published: WeightsReader) -> None:
        super().adopt(published)
        if self._acting is not None:
            self._acting.tell_statistics()


def trainer(
    context: RoleContext, *, model: str, arguments: Mapping[str, Any] | None = None, steps: int = 1
) -> SB3Trainer:
    """Make the role for a plan.

    Args:
        model: "module:function", called with `arguments` and a ``seed``; returns the model with its environment.
        steps: as in `SB3Trainer`.

    Raises:
        PlanError: there is no such function, or it returns something else.
    """
    return PlayedTrainer(context, load(model)(**(arguments or {}), seed=context.seed % 2**32), steps=steps)


def plan(model: str, steps: int, arguments: Mapping[str, Any] | None = None, *, step: int = 1, seed: int = 0) -> Plan:
    """The plan of a training of any model of Stable-Baselines3; publishes the whole policy on the channel "policy".

    Args:
        model, arguments: as in `trainer`.
        steps: environment steps in all, rounded up to whole steps of the role.
        step: environment steps that a step of the role makes at least: raise it where a rollout is short, as with DQN.
        seed: of the run.

    Example:
        ``jurybox train plan --plan jurybox.training.trainings.sb3:plan --set 'arguments.model = "cartpole:model"' --set
        arguments.steps=20000`` with a file cartpole.py: ``def model(seed): return PPO("MlpPolicy", "CartPole-v1",
        seed=seed)``.
    """
    made = load(model)(**(arguments or {}), seed=seed)
    if not isinstance(made, BaseAlgorithm) or made.env is None:
        raise PlanError(f"{model} made a {type(made).__name__}, expected a model of Stable-Baselines3 with environment")
    network: torch.nn.Module = made.policy
    policy = None
    with suppress(CannotAct):  # the role says why
        network = acting = ActingPolicy(made)
        policy = description(acting, f"weights-{POLICY}.state", model, arguments or {}, steps, seed).as_dict()
    layout = WeightsLayout.of(network.state_dict())
    made.env.close()
    settings = {"model": model, "arguments": dict(arguments or {}), "steps": step}
    return Plan(
        roles=(RoleSpec("trainer", Kind.TRAINER, f"{__name__}:trainer", settings, publishes=POLICY),),
        channels=(ChannelSpec(POLICY, layout),),
        budget=Budget(steps),
        seed=seed,
        log_every=max(1, steps // 100),
        columns=(*LEARNER_COLUMNS, "loss", "actor_loss", "critic_loss", "ent_coef"),
        policy=policy,
    )


def acting(model: str, arguments: Mapping[str, Any] | None = None) -> ServedModel:
    """The policy of a model as one that engines load.

    Args:
        model: "module:function", called with `arguments` and a ``seed``.
    """
    made = _made(model, arguments)
    assert made.env is not None
    network = ActingPolicy(made)
    made.env.close()
    given = {leaf.name: TensorSpec(leaf.dtype, leaf.shape) for leaf in network.inputs}
    return ServedModel(network, given, {name: TensorSpec("float32", shape) for name, shape in network.outputs.items()})


def played(model: str, arguments: Mapping[str, Any] | None = None, render_mode: str | None = None) -> gymnasium.Env:
    """The environment of a model: made by its spec, or, of one that is not registered, the first that the model has.

    Raises:
        ValueError: there is neither, or what its spec makes has other observations.
    """
    environments: VecEnv = _made(model, arguments).env.unwrapped  # type: ignore[union-attr]
    spec = environments.get_attr("spec")[0]
    if spec is None:
        if isinstance(environments, DummyVecEnv):
            for each in environments.envs[1:]:
                each.close()
            return environments.envs[0]
        environments.close()
        raise ValueError(f"the environments of {model} are in processes and not registered: gymnasium.register them")
    environments.close()
    spec = copy.deepcopy(spec)
    # Those of Stable-Baselines3, such as Monitor, cannot be made again, and change nothing that a policy sees.
    spec.additional_wrappers = tuple(each for each in spec.additional_wrappers if each.kwargs is not None)
    made: gymnasium.Env = gymnasium.make(spec, render_mode=render_mode)
    if made.observation_space != environments.observation_space:
        made.close()
        raise ValueError(
            f"{spec.id} has the observations {made.observation_space}, its model {environments.observation_space}: a "
            "wrapper of the environment is no gymnasium.utils.RecordConstructorArgs"
        )
    return made


def description(
    network: ActingPolicy, weights: str, model: str, arguments: Mapping[str, Any], steps: int, seed: int
) -> Description:
    """The description of a model's policy, named "policy"."""
    made = {"model": model, "arguments": dict(arguments)}
    acts = Acts(f"{__name__}:acting", made, weights, **network.acts)
    return Description("plan", {"policy": acts}, f"{__name__}:played", made, {**made, "steps": steps}, seed)


def _made(model: str, arguments: Mapping[str, Any] | None) -> BaseAlgorithm:
    made: BaseAlgorithm = load(model)(**(arguments or {}), seed=0)
    return made
