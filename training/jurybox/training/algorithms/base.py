"""`Algorithm`: what a learning algorithm is, and all that a training asks of it.

What acts does not need torch: `torch` here, and the modules beside it, are imported where they are used first. A file
of your own may import torch at its top.
"""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from jurybox.training.algorithms.schedules import at, is_schedule
from jurybox.training.spaces import AgentSpec, grouped

if TYPE_CHECKING:
    import torch as torch  # noqa: PLC0414 (for others)

    from jurybox.training.algorithms import compiling as compiling  # noqa: PLC0414
    from jurybox.training.algorithms import networks as networks  # noqa: PLC0414
    from jurybox.training.algorithms import recurrent as recurrent  # noqa: PLC0414
    from jurybox.training.algorithms import torch_states as torch_states  # noqa: PLC0414
else:

    class _AtFirstUse:
        """A module that is imported when the first name of it is asked for."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            found = self.__dict__[name] = getattr(import_module(self._name), name)
            return found

    torch = _AtFirstUse("torch")
    compiling = _AtFirstUse("jurybox.training.algorithms.compiling")
    networks = _AtFirstUse("jurybox.training.algorithms.networks")
    recurrent = _AtFirstUse("jurybox.training.algorithms.recurrent")
    torch_states = _AtFirstUse("jurybox.training.algorithms.torch_states")

__all__ = [
    "Algorithm", "AlgorithmSettings", "AlgorithmUnusable", "OffPolicySettings", "OnPolicySettings", "Progress",
    "RecurrentReplaySettings", "RecurrentSettings", "Rollout", "Update", "clipped", "descend", "draw_categorical",
    "draw_choices", "draw_normal", "log_softmax", "take", "weighed",
]  # fmt: skip

_log = logging.getLogger("jurybox.learner")

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
Floats = npt.NDArray[np.float32]
Batch = Mapping[str, "torch.Tensor"]
Choose = Literal["best", "box", "tanh", "clip", "both"]


class AlgorithmUnusable(ValueError):
    """There is no such algorithm, or it cannot choose such actions; the message says what is expected."""


class Progress(NamedTuple):
    """How far a training is: env steps of all environments that were made, and that will have been at the end."""

    env_steps: int
    total: int

    @property
    def remaining(self) -> float:
        """From 1 at the start to 0 at the end, for schedules."""
        return max(0.0, 1.0 - self.env_steps / max(self.total, 1))


class Update(NamedTuple):
    """The result of an update; tensors stay on the device until they are read.

    Attributes:
        metrics: numbers by name.
        priorities: (n,) mean absolute errors, the priorities of a batch's rows; None: it has none.
    """

    metrics: Mapping[str, torch.Tensor | float]
    priorities: torch.Tensor | None = None


def weighed(losses: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Losses (..., n) of a batch's rows times their importance weights, if it has any."""
    weights = batch.get("weights")
    return losses if weights is None else losses * weights


def descend(
    optimiser: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    loss: torch.Tensor,
    max_grad_norm: float | None = None,
) -> None:
    """Make a step by the gradients of these parameters alone: a policy's loss runs through critics, whose own are of no
    use then.

    Args:
        max_grad_norm: norm that the gradients, taken together, are shortened to if theirs is larger.
    """
    gradients = torch.autograd.grad(loss, parameters)
    if max_grad_norm is not None:
        gradients = clipped(gradients, max_grad_norm)
    take(optimiser, parameters, gradients)


def take(
    optimiser: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> None:
    """Make a step of an optimiser of these parameters, by these gradients; in a compiled step of `compiling.Adam`."""
    if getattr(compiling.TRACING, "on", False):
        if not isinstance(optimiser, compiling.Adam):
            raise TypeError(f"{type(optimiser).__name__} in a step that is compiled: expected compiling.Adam")
        optimiser.traced_step(gradients)
        return
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimiser.step()


def clipped(gradients: Sequence[torch.Tensor], max_norm: float) -> tuple[torch.Tensor, ...]:
    """Gradients shortened to that norm, taken together, if theirs is larger; as torch's `clip_grad_norm_` does."""
    with torch.no_grad():
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients]))
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return tuple(each * factor for each in gradients)


@dataclass(slots=True)
class Rollout:
    """`t` steps of `n` environments.

    Attributes:
        observation: (t, n, inputs), float32 unless the network takes other rows.
        action: int64 (t, n), (t, n, choices) of several choices, or float32 (t, n, actions) where they are numbers.
        log_prob, value, reward: float32 (t, n).
        terminated, ended: bool (t, n); `ended` marks the last step of an episode, however it ended.
        next_value: float32 (t, n), the value of what followed where `ended` and not terminated; anything elsewhere.
        last_value: float32 (n,), of what follows the last step.
        mask: bool (t, n, actions), or None.
        memory: float32 (t, n, numbers), what a recurrent network remembered before each step; None: it is none.
        valid: bool (t, n), the steps to learn from; None: all. What is left out is `ended`, and so is what precedes it.
    """

    observation: npt.NDArray[Any]
    action: npt.NDArray[Any]
    log_prob: Floats
    value: Floats
    reward: Floats
    terminated: npt.NDArray[np.bool_]
    ended: npt.NDArray[np.bool_]
    next_value: Floats
    last_value: Floats
    mask: npt.NDArray[np.bool_] | None = None
    memory: Floats | None = None
    valid: npt.NDArray[np.bool_] | None = None

    def part(self, first: int, end: int, last_value: Floats) -> Rollout:
        """Steps `first` to `end`, which is not part of it; `last_value` of what follows them. Shares the memory."""
        steps = {
            each.name: value[first:end]
            for each in dataclasses.fields(self)
            if each.name != "last_value" and (value := getattr(self, each.name)) is not None
        }
        return Rollout(**steps, last_value=last_value)


class AlgorithmSettings(BaseModel):
    """Settings of every algorithm. Each field of a subclass is a setting of the training and a flag of its command."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gamma: float = Field(0.99, ge=0, le=1, description="Discount factor.")
    learning_rate: float = Field(3e-4, gt=0, description="Learning rate of Adam.")
    batch_size: int = Field(256, ge=2, description="Transitions in one optimiser step.")
    hidden: tuple[int, ...] = Field((64, 64), description="Sizes of the hidden layers of every network.")

    @field_validator("hidden")
    @classmethod
    def _has_units(cls, hidden: tuple[int, ...]) -> tuple[int, ...]:
        if min(hidden, default=1) < 1:
            raise ValueError(f"hidden={hidden}: expected layers of one unit or more")
        return hidden

    @property
    def scheduled(self) -> dict[str, str]:
        """The settings that change over the run: their schedules by name (see `schedules`)."""
        return {name: value for name, value in self if is_schedule(value)}

    def unused(self) -> Mapping[str, str]:
        """Return the settings that have no effect with the others, and why."""
        return {}


class RecurrentSettings(AlgorithmSettings):
    """Settings of algorithms whose policies can be recurrent."""

    recurrent: Literal["lstm", "gru"] | None = Field(
        None, description="Memory between the first layer and the hidden ones: lstm or gru; none: there is none."
    )
    hidden_size: int = Field(256, ge=1, description="Units of the memory of a recurrent policy and its value, each.")

    def unused(self) -> Mapping[str, str]:
        if self.recurrent is not None:
            return {"compile": "updates of a recurrent policy are not compiled"}
        own = ("hidden_size", "sequence_length", "burn_in")
        why = "recurrent is none: there is no memory (hidden are the hidden layers)"
        return {name: why for name in own if name in type(self).model_fields}


class OnPolicySettings(AlgorithmSettings):
    """Settings of algorithms that learn from the newest policy's steps alone."""

    n_steps: int = Field(2048, ge=1, description="Steps per environment between two updates.")
    batch_size: int = Field(64, ge=2, description="Transitions in one optimiser step.")


class OffPolicySettings(AlgorithmSettings):
    """Settings of algorithms that learn from a replay."""

    n_steps: int = Field(1, ge=1, description="Steps of the n-step return.")
    buffer_size: int | None = Field(
        None, ge=1, description="Capacity of the replay, in transitions; none: a million, or what fits in 2 GiB."
    )
    learning_starts: int = Field(100, ge=1, description="Env steps with random actions and without learning.")
    train_freq: int = Field(1, ge=1, description="Steps per environment between two rounds of learning.")
    gradient_steps: int = Field(1, ge=-1, description="Learner steps per round; -1: as many as env steps.")
    publish_interval: int = Field(1, ge=1, description="Learner steps between two publications.")
    max_ahead: int = Field(100, ge=0, description="Env steps by which workers may be ahead of the learner.")

    @model_validator(mode="after")
    def _learns(self) -> OffPolicySettings:
        if self.gradient_steps == 0:
            raise ValueError("gradient_steps=0: nothing would be learned; expected 1 or more, or -1")
        return self

    def unsampled(self, envs: int) -> int:
        """The most rows that a replay can hold of which none can be sampled.

        The newest n_steps transitions of each environment have no successors yet, and the row before them may be the
        last observation of an episode, which is no transition.
        """
        return (self.n_steps + 1) * envs

    def round(self, envs: int) -> tuple[int, int]:
        """Env steps of all environments between two rounds of learning, and learner steps of a round."""
        collect = self.train_freq * envs
        return collect, collect if self.gradient_steps == -1 else self.gradient_steps


class RecurrentReplaySettings(OffPolicySettings, RecurrentSettings):
    """The same of those that learn from a replay: a recurrent one from windows of it, see `recurrent`."""

    sequence_length: int = Field(
        16, ge=1, description="Successive transitions that a recurrent policy learns from together."
    )
    burn_in: int = Field(
        8, ge=0, description="Transitions before those that only bring what was remembered there up to date."
    )

    @model_validator(mode="after")
    def _has_windows(self) -> RecurrentReplaySettings:
        if self.recurrent is not None and self.n_steps != 1:
            raise ValueError(
                f"n_steps={self.n_steps} with recurrent={self.recurrent}: expected n_steps = 1, since each step of a "
                "window is valued by the one after it"
            )
        if self.recurrent is not None and self.batch_size < self.sequence_length:
            raise ValueError(
                f"batch_size={self.batch_size} with sequence_length={self.sequence_length}: expected the transitions "
                "of a sequence or more; raise batch_size, or lower sequence_length"
            )
        return self

    def unsampled(self, envs: int) -> int:
        """Of windows: the newest rows lack successors, the oldest ones those before them."""
        if self.recurrent is None:
            return super().unsampled(envs)
        return (self.burn_in + self.sequence_length + 1) * envs


class Algorithm(ABC):
    """One learning algorithm: its settings, its network, how it acts, its update.

    The training makes one for each process. A worker and a server use `network`, `outputs`, `explore` and `greedy`; a
    learner calls `setup` once and then `update`. A complete one is in docs/your_algorithm.md.

    Args:
        settings: of the class `Settings`.
        spec: what is observed, and which actions there are.

    Class attributes:
        Settings: a subclass of `OffPolicySettings` or `OnPolicySettings`, with names, defaults and descriptions.
        kept: attributes that checkpoints hold beside the parts: numbers, or lists of them.
        masks: whether it never chooses an action that a mask forbids (`spec.masked`): its network takes the mask as its
            last argument, and a batch has "action_mask" and "next_action_mask".
        on_policy: whether it learns from a `Rollout` of the newest policy; else from batches of a replay.
        metrics: names of the metrics that `update` and `exploration` may return, columns of metrics.csv; another one is
            an error.
        hidden_after_pictures: `hidden`, if it is not set, where pictures are all that is observed.
        memories: of a recurrent network: its own, and its values' if they are learned by another one.

    Attributes:
        acting: the network that is published; `setup` sets it.
        envs: number of environments, over all workers.
        compiles: whether `run` compiles its steps, see `compiling`.
        alive: call it several times a minute in a long update: a learner that gives no sign of life is restarted.
        stops: whether the run waits for the end of the update; any thread may ask.
        restored: whether `load_state_dict` was called.
        raw: whether its networks take the environment's own observations, one argument an input, instead of rows.

    Raises:
        AlgorithmUnusable: it cannot choose such actions.
    """

    Settings: ClassVar[type[AlgorithmSettings]] = OffPolicySettings
    on_policy: ClassVar[bool] = False
    masks: ClassVar[bool] = False
    metrics: ClassVar[tuple[str, ...]] = ()
    hidden_after_pictures: ClassVar[tuple[int, ...]] = ()
    kept: ClassVar[tuple[str, ...]] = ()
    memories: ClassVar[int] = 0
    acting: torch.nn.Module

    def __init__(self, settings: Any, spec: AgentSpec) -> None:
        self.settings, self.spec = settings, spec
        self.envs = 1
        self.alive: Callable[[], None] = lambda: None
        self.stops: Callable[[], bool] = lambda: False
        self.restored = self.raw = self.compiles = False
        self._compiled: dict[str, compiling.CompiledStep] = {}
        if spec.masked and not self.masks:
            raise AlgorithmUnusable("it has no masks of actions: set action_masks = false, or take ppo, dqn or iqn")
        if spec.masked and not (spec.action.chosen or spec.action.mixed):
            raise AlgorithmUnusable("masks are of actions to choose from, and these are numbers: action_masks = false")
        self.check()

    # ---- what acts

    def check(self) -> None:  # noqa: B027 (most can do all)
        """Raise AlgorithmUnusable if it cannot choose actions as those of `spec`."""

    @property
    @abstractmethod
    def outputs(self) -> Mapping[str, tuple[int, ...]]:
        """The network's outputs by name, in its order, and their shapes for one observation; float32."""

    @property
    @abstractmethod
    def chooses(self) -> tuple[str, Choose]:
        """The output that an action without exploration is computed from, and how.

        "best": the number of its largest element, of several choices of each one's; "box": its numbers in [-1, 1],
        which are scaled to the bounds of the environment's actions; "tanh": the same of its hyperbolic tangent;
        "clip": its numbers in the environment's unit, cut off at the bounds.
        """

    @abstractmethod
    def network(self) -> torch.nn.Module:
        """Create the network that acts. It begins with `encoder`, and returns the outputs, a tuple of them if several.

        The names and shapes of its ``state_dict()`` must always be the same; its weights are drawn by torch's own
        generator, which `seeded` seeds.
        """

    @abstractmethod
    def explore(self, outputs: Arrays, rng: np.random.Generator, progress: Progress) -> tuple[Array, Arrays]:
        """Choose actions for training, in NumPy.

        Args:
            outputs: of the network, (n, ...) by name.

        Returns:
            Actions, (n,) numbers of them, (n, choices) of several, or (n, size) float32; and the `columns` of these
            steps, (n, ...).
        """

    def greedy(self, outputs: Arrays) -> Array:
        """Choose actions without exploration, as `chooses` says."""
        name, how = self.chooses
        if how == "best":
            return self.spec.action.best(outputs[name])
        if how == "both":
            return np.concatenate((self.spec.action.best(outputs[name]), outputs["mean"]), 1).astype(np.float32)
        return np.tanh(outputs[name]) if how == "tanh" else outputs[name]

    def checked(self, what: str, actions: Any, n: int, mask: Array | None = None) -> Array:
        """Return actions that were chosen for `n` observations, before an environment gets them.

        It takes 5 to 10 microseconds of one environment and of 64, and with masks 16 to 20.

        Args:
            what: chose them, for messages.
            mask: of the actions that are allowed, bool (n, `action.size`), if there are masks.

        Raises:
            AlgorithmUnusable: one is no action: of another shape or dtype, a number that is not finite or, of "box" and
                "tanh", beyond [-1, 1], or a choice that there is not or that the mask forbids.
        """
        action, what = self.spec.action, f"what {what} chooses"
        found = expected(what, actions, (n, *action.shape), "iu" if action.chosen else "f")
        if action.discrete:
            if not (found.min() >= 0 and found.max() < action.size):
                raise AlgorithmUnusable(f"{what} is {found.tolist()}, expected 0 to {action.size - 1}")
        elif action.counts:
            choices = found[:, : len(action.counts)]
            if not ((choices >= 0) & (choices < action.counts)).all() or (action.mixed and (choices % 1).any()):
                most = [count - 1 for count in action.counts]
                raise AlgorithmUnusable(f"{what} is {choices.ravel().tolist()}, expected 0 to {most}")
        if mask is not None:
            self._check_allowed(what, found, mask)
        if action.chosen:
            return found
        numbers = found[:, len(action.counts) :]
        if self.chooses[1] in ("box", "tanh"):
            if not np.abs(numbers).max(initial=0.0) <= 1.0:
                raise AlgorithmUnusable(
                    f"{what} is {numbers.ravel().tolist()}, expected numbers in [-1, 1], which are scaled to the bounds"
                )
        elif not np.isfinite(numbers).all():
            raise AlgorithmUnusable(f"{what} is {numbers.ravel().tolist()}, expected numbers that are finite")
        return found

    def _check_allowed(self, what: str, found: Array, mask: Array) -> None:
        """Raise AlgorithmUnusable if a choice is forbidden where something is allowed."""
        counts = self.spec.action.counts or (self.spec.action.size,)
        choices = found.reshape(len(found), -1)[:, : len(counts)].astype(np.int64)
        if mask[np.arange(len(found))[:, None], np.add(choices, (0, *accumulate(counts[:-1])))].all():
            return
        allowed = grouped(mask.astype(np.float32), counts) > 0  # nothing is where an episode is over
        wrong = allowed.any(-1) & ~np.take_along_axis(allowed, choices[..., None], -1)[..., 0]
        for row, choice in np.argwhere(wrong):
            may = np.flatnonzero(allowed[row, choice]).tolist()
            raise AlgorithmUnusable(f"{what} is {choices.ravel().tolist()}, and the mask allows {may} alone")

    def exploration(self, progress: Progress) -> Mapping[str, float]:
        """Metrics of the exploration now, such as epsilon."""
        return {}

    def check_metrics(self, method: str, told: Mapping[str, Any]) -> None:
        """Raise AlgorithmUnusable if a method returned a metric that `metrics` does not name, so that has no column."""
        if unnamed := sorted(told.keys() - set(self.metrics)):
            name = type(self).__name__
            raise AlgorithmUnusable(
                f"{name}.{method} returned the metric {unnamed[0]!r}, and `metrics` of {name} is {self.metrics}: "
                "add it there, which makes it a column of metrics.csv"
            )

    @property
    def columns(self) -> Mapping[str, tuple[int, ...]]:
        """Columns of a step beyond observation, action, reward and terminated: float32, their shapes by name."""
        return {}

    @property
    def remembers(self) -> int:
        """How many numbers a recurrent network keeps from a step of an episode to the next; 0: it is none.

        The last argument of such a network is its memory, float32 (n, numbers), zeros where an episode begins; the last
        tensor that it returns, after the outputs, is the memory of the next step. Rows have it as the column "memory".
        """
        s = self.settings
        if not isinstance(s, RecurrentSettings) or s.recurrent is None:
            return 0
        return self.memories * (2 if s.recurrent == "lstm" else 1) * s.hidden_size

    # ---- what learns, with torch

    @abstractmethod
    def setup(self, seed: int, device: str) -> None:
        """Create all that learns, in attributes. Modules, optimisers and generators among them are in checkpoints.

        Args:
            seed: of generators of its own; torch's own is seeded with it, too, while this runs.
            device: where it computes.
        """

    @abstractmethod
    def update(self, batch: Any, progress: Progress) -> Update:
        """Make one update.

        Args:
            batch: a `Batch`, or a `Rollout` if it is `on_policy`. A batch has, on the device: "observation" and
                "next_observation", rows as `encoder` takes them; "action", int64 (n,) or float32 (n, size) in [-1, 1];
                "reward" (n,), sums of n steps; "discount" (n,), the factor of what follows, 0 after a termination; and
                from a prioritized replay "weights" (n,), see `weighed`: then the update has to return priorities. If
                it `remembers`, its observations are `recurrent.Windowed`, which networks of `torsos` take as rows.
        """

    def steps_of(self, rows: int) -> int:
        """Return how many optimiser steps an update makes at most; `rows` of a rollout, if it is `on_policy`."""
        return 1

    def values(self, observation: Array, memory: Array | None = None) -> Floats:
        """Of `on_policy` ones: values (n,) of rows (n, ...), and of the memory before them if it `remembers`."""
        raise NotImplementedError(f"{type(self).__name__} is on_policy and has no method `values`, which those need")

    def remembered(self, observation: Array, memory: Array) -> Floats:
        """Of `on_policy` ones that remember: the memory (n, numbers) after rows (n, ...), and that before them."""
        raise NotImplementedError(f"{type(self).__name__} remembers and has no method `remembered`, which those need")

    def parts(self) -> Mapping[str, torch_states.Part]:
        """The modules, optimisers and generators that are learned with, by name: those in attributes."""
        kinds = (torch.nn.Module, torch.optim.Optimizer, torch.Generator)
        return {name: part for name, part in vars(self).items() if isinstance(part, kinds)}

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs, for checkpoints: the state of `parts`, and what is `kept`."""
        return {**torch_states.states_of(self.parts()), **{name: getattr(self, name) for name in self.kept}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; its arrays may be NumPy's."""
        torch_states.restore_states(self.parts(), state)
        for name in self.kept:
            setattr(self, name, state[name])

    def load_published(self, weights: Mapping[str, torch.Tensor], updates: int) -> None:
        """Go on from the last published weights, after a predecessor was killed that had made so many updates."""
        self.acting.load_state_dict(weights)

    # ---- tools

    def encoder(self, *, orthogonal: bool = False) -> networks.Features:
        """Create the first layer of a network: observations to float32 (n, `size`); see `networks.Features`."""
        spec = self.spec
        return networks.Features(
            spec.numbers,
            spec.pictures,
            normalise=spec.normalize,
            clip=spec.clip,
            orthogonal=orthogonal,
            inputs=spec.inputs,
            raw=self.raw,
        )

    def torsos(self) -> list[recurrent.Torso]:
        """Create the first layers of a recurrent network, see `recurrent.Recurrent`: one for each of its `memories`."""
        s, numbers = self.settings, self.remembers // self.memories
        return [
            recurrent.Torso(self.encoder(), s.recurrent, s.hidden_size, number * numbers)
            for number in range(self.memories)
        ]

    def check_bounded(self) -> None:
        """Raise AlgorithmUnusable unless actions are numbers with finite bounds."""
        if self.spec.action.counts:
            these = "several choices and numbers" if self.spec.action.mixed else "several choices"
            raise AlgorithmUnusable(f"it gives numbers as actions, and these are {these}: take ppo")
        if self.spec.action.discrete:
            raise AlgorithmUnusable("it gives numbers as actions, and these are one of some: take ppo or dqn")
        if not self.spec.action.bounded:
            raise AlgorithmUnusable(
                "it scales its actions to their bounds, and these have none: bound them in a wrapper "
                "(gymnasium.wrappers.RescaleAction), or take ppo"
            )

    def critic(self) -> networks.SeeingCritic:
        """Create two critics of observations and actions (n, size), of the hidden layers that are set.

        Those of a recurrent policy, which has to be `acting`, see what is remembered for them beside it.
        """
        acting: Any = self.acting if self.remembers else None
        features = self.encoder() if acting is None else acting.beside[0]
        return networks.SeeingCritic(features, self.spec.action.size, self.settings.hidden)

    def own_parameters(self, actor: torch.nn.Module) -> list[torch.nn.Parameter]:
        """The parameters of a policy, without those of what is remembered beside it, which the critics learn."""
        return [each for name, each in actor.named_parameters() if not name.startswith("beside.")]

    def run(self, step: Callable[[Batch], dict[str, torch.Tensor]], given: Batch) -> dict[str, torch.Tensor]:
        """Run a method that computes with tensors alone, as a compiled graph if it `compiles`.

        Args:
            step: takes and returns tensors by name. It has no random numbers and no branches on values, changes
                parameters in place, and its optimisers are of `compiling.Adam`, by `descend` or `take`.
        """
        name = step.__name__
        if self.compiles:
            graph = self._compiled.get(name)
            if graph is None:
                graph = self._compiled[name] = compiling.CompiledStep(step, self.alive, self.stops)
            try:
                return graph(given)
            except compiling.CompileStopped:
                return step(given)
            except Exception as error:
                if graph.ran:
                    raise
                self.compiles = False
                told = str(error).strip().splitlines() or [""]
                _log.warning(
                    "the learner goes on without compiling, at some half to a quarter of the speed: %s: %s",
                    type(error).__name__,
                    told[0],
                )
        return step(given)

    def anneal(self, learning_rate: float | str, progress: Progress, *optimisers: torch.optim.Optimizer) -> None:
        """Set the learning rate of these optimisers, or of all, if it is a schedule. Call it before an update."""
        if isinstance(learning_rate, str):
            every = (part for part in self.parts().values() if isinstance(part, torch.optim.Optimizer))
            for optimiser in optimisers or every:
                for group in optimiser.param_groups:
                    rate = at(learning_rate, progress.remaining)
                    if isinstance(group["lr"], torch.Tensor):
                        group["lr"].fill_(rate)
                    else:
                        group["lr"] = rate

    def seeded(self, make: Callable[[], torch.nn.Module], seed: int) -> Any:
        """Create a network with the weights of that seed; torch's own generator stays as it is."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make()


def expected(what: str, found: Any, shape: tuple[int, ...], kinds: str) -> Array:
    """Return what an algorithm gave as an array. Raises AlgorithmUnusable: it has another shape or kind of dtype."""
    array = np.asarray(found)
    if array.shape != shape or array.dtype.kind not in kinds:
        wanted = "floats" if kinds == "f" else "whole numbers"
        raise AlgorithmUnusable(
            f"{what} is {array.dtype} of shape {array.shape} for {shape[0]} observations, expected {wanted} of shape "
            f"{shape}"
        )
    return array


# ---- drawing actions, in NumPy


def log_softmax(logits: Array) -> npt.NDArray[np.float64]:
    """Return the log-probabilities for logits, both (..., actions)."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    found: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def draw_categorical(logits: Array, rng: np.random.Generator) -> tuple[Array, Floats]:
    """Draw one of the actions for each row of logits (n, actions); returns them and their log-probabilities, (n,)."""
    log_probs = log_softmax(logits)
    # The argmax of log-probabilities plus Gumbel noise is a sample from the distribution.
    action = (log_probs + rng.gumbel(size=log_probs.shape)).argmax(1)
    return action, log_probs[np.arange(len(action)), action].astype(np.float32)


def draw_choices(logits: Array, counts: tuple[int, ...], rng: np.random.Generator) -> tuple[Array, Floats]:
    """Draw several choices for each row of logits (n, sum of counts), which lie side by side.

    Returns:
        int64 (n, choices), and the sums of their log-probabilities, (n,).
    """
    log_probs = log_softmax(grouped(logits, counts))
    action = (log_probs + rng.gumbel(size=log_probs.shape)).argmax(-1)
    chosen = np.take_along_axis(log_probs, action[..., None], -1)[..., 0]
    return action, chosen.sum(-1).astype(np.float32)


def draw_normal(mean: Array, log_std: Array, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Draw numbers (n, size) from normal distributions; returns them and the logarithms of their densities, (n,)."""
    noise = rng.standard_normal(mean.shape)
    drawn = (mean + np.exp(log_std) * noise).astype(np.float32)
    density = -0.5 * ((drawn - mean) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)
    return drawn, density.sum(1).astype(np.float32)
