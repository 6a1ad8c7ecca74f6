"""Find, play, evaluate and export learned policies.

Next to the weights, every checkpoint contains ``policy.json``, which describes how they are used: the network's factory
and its arguments, the output that actions are chosen from and how, and the training's environment. docs/policies.md
describes the format. Each training writes it (`Description`), so that this module works for all trainings. Nothing in
it is unpickled, but it names two factories, whose modules are imported.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from jurybox.protocol.revision import source_revision
from jurybox.protocol.wire import build_version
from jurybox.server.models import ServedModel
from jurybox.training import interrupts
from jurybox.training.algorithms.networks import side_by_side
from jurybox.training.checkpoints import DOCUMENT, EVALUATION, CheckpointError, read_state, write_atomically
from jurybox.training.environments.adapter import Moved, Result, Waiting
from jurybox.training.roles.evaluation import Episode, play_episodes
from jurybox.training.runtime.plan import POLICY_FILE, RunError, load
from jurybox.training.spaces import (
    MASK,
    MEMORY,
    StrangeObservation,
    action_mask,
    as_action,
    begun,
    converted,
    named,
    stepped,
)

__all__ = [
    "Acting",
    "Acts",
    "Description",
    "Environment",
    "Episode",
    "Found",
    "Policy",
    "PolicyError",
    "choose",
    "export",
    "play",
    "policies",
    "score",
]

FORMAT = 3
SCORES = "policy-scores.json"  # in the run's folder: the results of evaluations, by the digest of the weights
_CHECKPOINTS, _BEST, _PREFIX = "checkpoints", "best", "step-"
# Modules whose definitions an untrusted file may name: networks, environments, and factories among their arguments.
_NETWORKS = ("jurybox.training.algorithms.served_networks", "jurybox.studies.photo.network")
_ENVIRONMENTS = (
    "jurybox.training.environments",
    *(f"jurybox.studies.{name}" for name in ("hockey.single", "hockey.parallel", "hockey.game", "hockey.original")),
    *(f"jurybox.studies.{name}" for name in ("photo.environment", "treasure", "workflow.cage", "workflow.defended")),
)
_ARGUMENT_MODULES = (*_ENVIRONMENTS, "jurybox.server.jurors")
_METADATA = "jurybox-policy"

Array = npt.NDArray[Any]
Choose = Literal["box", "tanh", "clip", "best", "draw", "both"]
_NUMBERED = ("best", "draw")  # their actions are integers


class PolicyError(RunError):
    """There is no such policy, or it cannot be used in this way; the message contains a remedy."""


@dataclass(frozen=True, slots=True)
class Acts:
    """The conversion of one set of weights to actions.

    Attributes:
        network: factory "package.module:callable" that returns a `jurybox.server.models.ServedModel`. The statistics
            that it normalises observations with are part of its weights.
        arguments: keyword arguments of the factory.
        weights: name of the file, next to the description, with the network's ``state_dict``.
        output: name of the network's output that the action is chosen from.
        choose: "box": clip the output to [-1, 1] and scale it to `low` to `high`; "tanh": the same with its hyperbolic
            tangent; "clip": clip the output to `low` to `high`; "best": the index of its largest element plus `first`;
            "draw": an index drawn from its softmax with torch's generator, plus `first`, for policies whose performance
            depends on their randomness, for example in a multi-agent environment; "both": "best" of the output, and
            "clip" of the output "mean" beside it.
        low, high: bounds of the environment's actions, flattened; None where there is none.
        first: see `choose`.
        counts, starts: of an action of several choices: the number of elements that each has in the output, side by
            side, and the environment's number of its first. The action has an index, plus its start, for each.
        parts: of an action that is a Dict or Tuple: the fields of `spaces.ActionPart` of each. The action is a tensor
            for each, in this order.
        own_arguments: arguments of the environment's factory for this policy only, such as its role in a multi-agent
            environment. The factory then also receives `partners`, the description's policies by name.
    """

    network: str
    arguments: Mapping[str, Any]
    weights: str
    output: str
    choose: Choose
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    first: int = 0
    counts: Sequence[int] = ()
    starts: Sequence[int] = ()
    parts: Sequence[Mapping[str, Any]] = ()
    own_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each tensor of an action, by its name; "action" if it is no Dict or Tuple."""
        if self.parts:
            return {part["name"]: (part["dtype"], tuple(part["shape"])) for part in self.parts}
        return {"action": ("int64" if self.choose in _NUMBERED else "float32", self.shape)}

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an action that is one tensor."""
        if self.choose in _NUMBERED:
            return (len(self.counts),) if self.counts else ()
        return (len(self.low),)


@dataclass(frozen=True, slots=True)
class Description:
    """The contents of ``policy.json``.

    Attributes:
        training: name of the training that created it.
        policies: how each policy acts, by its name.
        environment: factory of a `gymnasium.Env` whose observations are the network's inputs (the parts of a Dict or
            Tuple by name, see `spaces.named`); it is called with `environment_arguments` and ``render_mode``.
        settings: settings of the training.
        seed: seed of the training.
        version, commit: version and commit of Jurybox.
    """

    training: str
    policies: Mapping[str, Acts]
    environment: str
    environment_arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    version: str = field(default_factory=build_version)
    commit: str | None = field(default_factory=source_revision)

    def as_dict(self) -> dict[str, Any]:
        """Return the description as JSON values."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def of(cls, document: Mapping[str, Any], where: Path) -> Description:
        """Create a description from the result of `as_dict`. Raises PolicyError for another format."""
        given = dict(document)
        if (number := given.pop("format", None)) != FORMAT:
            raise PolicyError(
                f"{where} has the format {number!r}, this build reads {FORMAT}: use the build that wrote it, or train "
                "again"
            )
        try:
            acts = {name: Acts(**each) for name, each in given.pop("policies").items()}
            return cls(policies=acts, **given)
        except (TypeError, KeyError, AttributeError) as error:
            raise PolicyError(f"{where} is no description of a policy: {error}") from error


class Acting(nn.Module):
    """Maps observations to actions of the environment: normalisation, network and scaling in one module.

    It takes the network's inputs by position, and of a recurrent one the memory (n, numbers) after them, zeros where an
    episode begins. Actions are int64 (n,) for "best" and "draw", (n, choices) of several choices, else float32
    (n, ...); of a Dict or Tuple they are a tuple, a tensor for each part, in its dtype. A recurrent one returns them
    with the memory of the next step, in one tuple.
    """

    def __init__(self, served: ServedModel, acts: Acts) -> None:
        super().__init__()
        self.network, self._remembers = served.module, bool(served.state)
        self._output, self._place = acts.output, list(served.outputs).index(acts.output)
        self._choose, self._first, self._counts = acts.choose, acts.first, tuple(acts.counts)
        self._numbers = list(served.outputs).index("mean") if acts.choose == "both" else 0
        self._parts = [dict(part) for part in acts.parts]
        self.register_buffer("starts", torch.tensor(acts.starts, dtype=torch.int64), persistent=False)
        for name, bounds, none in (("low", acts.low, -math.inf), ("high", acts.high, math.inf)):
            numbers = [none if bound is None else bound for bound in bounds]
            self.register_buffer(name, torch.tensor(numbers, dtype=torch.float32), persistent=False)

    low: Tensor
    high: Tensor
    starts: Tensor

    def forward(self, *observation: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Compute the actions of n observations."""
        outputs: Any = self.network(*observation)
        actions = self._actions(outputs)
        if not self._remembers:
            return actions
        return (*actions, outputs[-1]) if isinstance(actions, tuple) else (actions, outputs[-1])

    def _actions(self, outputs: Any) -> Tensor | tuple[Tensor, ...]:
        found, numbers = outputs, outputs
        if isinstance(outputs, Mapping):
            found, numbers = outputs[self._output], outputs.get("mean")
        elif isinstance(outputs, tuple):
            found, numbers = outputs[self._place], outputs[self._numbers]
        if not self._parts:
            return self._chosen(found)
        if self._choose == "both":
            choices = side_by_side(found, self._counts).argmax(-1) + self.starts
            return self._divided(choices, torch.minimum(torch.maximum(numbers, self.low), self.high))
        whole = self._chosen(found)
        return self._divided(whole, whole)

    def _divided(self, choices: Tensor, numbers: Tensor) -> tuple[Tensor, ...]:
        """Return a tensor for each part of the action, of all choices and all numbers."""
        parts, choice, number = [], 0, 0
        for part in self._parts:
            dtype = getattr(torch, part["dtype"])
            if part["choices"]:
                found = choices[:, choice : choice + part["choices"]]
            else:
                found = numbers[:, number : number + part["numbers"]]
                found = found if dtype.is_floating_point else found.round()
            choice, number = choice + part["choices"], number + part["numbers"]
            parts.append(found.reshape(found.shape[0], *part["shape"]).to(dtype))
        return tuple(parts)

    def _chosen(self, found: Tensor) -> Tensor:
        if self._choose in _NUMBERED:
            if self._counts:
                found = side_by_side(found, self._counts)
            if self._choose == "draw":  # Gumbel-max trick: the argmax of logits plus Gumbel noise samples the softmax
                found = found - torch.rand_like(found).clamp_min(1e-20).log().neg().clamp_min(1e-20).log()
            best: Tensor = found.argmax(-1) + (self.starts if self._counts else self._first)
            return best
        if self._choose == "clip":
            return torch.minimum(torch.maximum(found, self.low), self.high)
        within: Tensor = torch.tanh(found) if self._choose == "tanh" else found.clamp(-1.0, 1.0)
        return self.low + (within + 1.0) * 0.5 * (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Found:
    """One policy of a run.

    Attributes:
        name: name of the policy.
        where: the checkpoint's folder, or the file that it was exported to.
        description: description of the run's policies.
        env_steps: env steps after which it was saved; None if unknown.
        best: whether it had the best evaluation.
        numbers: results of its evaluation by name; empty if it was not evaluated.
    """

    name: str
    where: Path
    description: Description
    env_steps: int | None
    best: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def acts(self) -> Acts:
        """The policy's network and weights, and how an action is chosen."""
        return self.description.policies[self.name]


def policies(run: Path) -> list[Found]:
    """Return all policies of a run, the best first, then from the newest to the oldest.

    Args:
        run: the run's folder (``--out``), a checkpoint's folder, or a .safetensors file written by `export`.

    Raises:
        PolicyError: there are none.
    """
    if run.suffix == ".safetensors" or (run / POLICY_FILE).is_file():
        return _policies_in(run)
    folder = run / _CHECKPOINTS
    places = sorted((each for each in folder.glob(f"{_PREFIX}*") if (each / POLICY_FILE).is_file()), reverse=True)
    if (folder / _BEST / POLICY_FILE).is_file():
        places.insert(0, folder / _BEST)
    found = [each for place in places for each in _policies_in(place)]
    if not found:
        reason = "no run was begun there" if not run.is_dir() else "it has no checkpoint with one yet"
        raise PolicyError(
            f"no policy in {run}: {reason}. Expected the folder that --out named, of a training that saved"
        )
    return found


def choose(run: Path, which: str = "best", name: str | None = None) -> Found:
    """Choose one of the policies.

    Args:
        run: as in `policies`.
        which: "best" (the newest if none has been evaluated), "latest", or a number of env steps.
        name: name of the policy, if there are several.

    Raises:
        PolicyError: there is no such policy, or there are several and `name` is None.
    """
    found = policies(run)
    names = list(dict.fromkeys(each.name for each in found))
    if name is None and len(names) > 1:
        raise PolicyError(f"{run} has the policies {', '.join(names)}: name one with --name")
    matching = [each for each in found if name in (None, each.name)]
    if which == "best":
        matching = matching[:1]
    elif which == "latest":
        matching = [each for each in matching if not each.best][:1] or matching[:1]
    else:
        matching = [each for each in matching if str(each.env_steps) == which]
    if not matching:
        available = ", ".join(dict.fromkeys(f"{each.env_steps} ({each.name})" for each in found))
        called = f"{name} " if name else ""
        raise PolicyError(f"no policy {called}of {which!r} in {run}; there are, by env steps: {available}")
    return matching[0]


def _policies_in(place: Path) -> list[Found]:
    content, steps, numbers = _read_description(place), None, {}
    evaluation, document = place / EVALUATION, place / DOCUMENT
    for path in (evaluation, document):
        if place.is_dir() and path.is_file():
            record = _json(path)
            steps, numbers = record.get("env_steps"), record.get("numbers", {})
            break
    description = Description.of(content, place)
    best = evaluation.is_file() if place.is_dir() else False
    return [Found(name, place, description, steps, best, numbers) for name in description.policies]


def _read_description(place: Path) -> dict[str, Any]:
    if place.suffix != ".safetensors":
        return _json(place / POLICY_FILE)
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(place, "np") as file:
            document: dict[str, Any] = json.loads(file.metadata()[_METADATA])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise PolicyError(f"{place} is no policy that 'jurybox policy export' wrote: {error}") from error
    return document


def _json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path} cannot be read: {error}") from error
    return found


class Environment(Protocol):
    """The part of `gymnasium.Env` that is used here."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]: ...
    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]: ...
    def render(self) -> Any: ...
    def close(self) -> None: ...


class Policy:
    """A loaded policy. Calling it maps observations (n, ...) to an array of actions (n, ...), or to several by name.

    Observations are as the environment gives them: one array, or several by the names of the `inputs`. One that is
    `recurrent` remembers the episodes of n environments: call `begin` before their first step.

    Args:
        found: the policy to load.
        trust: whether an exported file may name code outside Jurybox, which is then imported and called.

    Attributes:
        module: the policy as a torch module, on the CPU.
        digest: digest of its weights.

    Raises:
        PolicyError: the weights are missing, damaged or don't match the described network, or an untrusted file names
            other code.
    """

    def __init__(self, found: Found, *, trust: bool = False) -> None:
        self.found = found
        self._doubted = found.where.is_file() and not trust
        if self._doubted:
            _check_trusted(found.where, found.acts.network, _NETWORKS, found.acts.arguments)
        self.served: ServedModel = load(found.acts.network)(**found.acts.arguments)
        state = _weights(found)
        try:
            self.served.module.load_state_dict(state)
        except RuntimeError as error:
            raise PolicyError(f"the weights in {found.where} don't fit {found.acts.network}: {error}") from error
        self.module = Acting(self.served, found.acts).eval().requires_grad_(False)
        self.digest = _digest(state)
        self._memory: Tensor | None = None
        self.fps = 30.0  # the environment's frames per second; known once it has been created

    def __call__(self, observations: Array | Mapping[str, Array]) -> Any:
        """Compute the actions of n observations, of a Dict or Tuple the parts by name.

        Raises:
            PolicyError: the observations are not what the inputs are.
        """
        given = observations if isinstance(observations, Mapping) else {next(iter(self.inputs)): observations}
        if given.keys() != self.inputs.keys():
            raise PolicyError(f"this policy takes {', '.join(self.inputs)}: got {', '.join(map(str, given))}")
        try:
            rows = [
                converted(given[name], spec.dtype, (len(given[name]), *spec.shape), f"the input {name!r}")
                for name, spec in self.inputs.items()
            ]
        except StrangeObservation as error:
            raise PolicyError(str(error)) from error
        tensors = [torch.from_numpy(np.ascontiguousarray(each)) for each in rows]
        with torch.inference_mode():
            if not self.recurrent:
                return self._named(self.module(*tensors))
            if self._memory is None or len(self._memory) != len(rows[0]):
                begun_for = "it has not been called" if self._memory is None else f"that was for {len(self._memory)}"
                raise PolicyError(
                    f"this policy remembers its episodes: call begin({len(rows[0])}) before the first step of so many "
                    f"environments, {begun_for}"
                )
            *actions, self._memory = self.module(*tensors, self._memory)
        return self._named(tuple(actions) if self.found.acts.parts else actions[0])

    def _named(self, actions: Any) -> Any:
        """Return actions as an array, or of a Dict or Tuple the arrays of its parts by name."""
        if isinstance(actions, tuple):
            return {name: part.numpy() for name, part in zip(self.found.acts.tensors, actions, strict=True)}
        return actions.numpy()

    @property
    def recurrent(self) -> bool:
        """Whether it remembers what it has observed in an episode."""
        return bool(self.served.state)

    def begin(self, n: int = 1, ended: Array | None = None) -> None:
        """Let episodes begin, of which a recurrent policy remembers nothing.

        Args:
            n: environments that it is called for from now on.
            ended: bool (n,), those in which an episode begins, while those of the others go on; None: in all.
        """
        if not self.recurrent:
            return
        with torch.inference_mode():
            memory = torch.zeros(n, *self.served.state[MEMORY].shape)
            if ended is not None and self._memory is not None:
                memory = torch.where(torch.from_numpy(np.asarray(ended, np.bool_))[:, None], memory, self._memory)
            self._memory = memory

    def act(self, observation: Any, mask: Array | None = None) -> Any:
        """Compute the action for one observation of the environment; `spaces.as_action` makes it the environment's.

        Args:
            mask: of the actions that may be chosen, of a policy with the input "action_mask" (see
                `spaces.action_mask`).

        Raises:
            PolicyError: the observation is not what it takes.
        """
        alone = len(self.inputs) == 1 and not isinstance(observation, Mapping | tuple)
        parts = {next(iter(self.inputs)): observation} if alone else named(observation)
        if mask is not None:
            parts[MASK] = mask
        found = self({name: np.asarray(parts[name])[None] for name in self.inputs if name in parts})
        return {name: part[0] for name, part in found.items()} if isinstance(found, Mapping) else found[0]

    def mask(self, environment: Any, info: Mapping[str, Any]) -> Array | None:
        """Return the mask of actions that this policy takes with the next observation; None: it takes none."""
        spec = self.found.acts.arguments.get("spec", {})
        if not (isinstance(spec, Mapping) and spec.get("masked")):
            return None
        return action_mask(environment, info, self.inputs[MASK].shape[0], tuple(self.found.acts.counts))

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The specs of one observation, by name."""
        return self.served.inputs

    @contextmanager
    def environment(self, changes: Mapping[str, Any] | None = None, *, render: bool = False) -> Iterator[Environment]:
        """Create the training's environment and close it after the block; `changes` override its arguments.

        Raises:
            PolicyError: it cannot be created.
        """
        description, arguments = self.found.description, self.environment_arguments(changes)
        more: dict[str, Any] = {"partners": self._partners()} if self.found.acts.own_arguments else {}
        try:
            made: Environment = load(description.environment)(
                **arguments, **more, render_mode="rgb_array" if render else None
            )
        except (TypeError, ValueError, ImportError) as error:
            raise PolicyError(f"{description.environment} cannot be made with {arguments}: {error}") from error
        self.fps = float(getattr(made, "metadata", {}).get("render_fps") or self.fps)
        try:
            yield made
        finally:
            made.close()

    def environment_arguments(self, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the arguments of the training's environment; `changes` override them.

        Raises:
            PolicyError: an untrusted file names code that is not Jurybox's.
        """
        given, own = self.found.description.environment_arguments, self.found.acts.own_arguments
        if self._doubted:
            _check_trusted(self.found.where, self.found.description.environment, _ENVIRONMENTS, [given, own])
        return {**given, **own, **(changes or {})}

    def _partners(self) -> dict[str, Policy]:
        """Return all policies of the checkpoint by name, including this one; an exported file contains only one."""
        if self.found.where.is_file():
            return {self.found.name: self}
        names = self.found.description.policies
        return {name: self if name == self.found.name else Policy(replace(self.found, name=name)) for name in names}


def _check_trusted(where: Path, factory: str, places: Sequence[str], arguments: Any) -> None:
    """Raise PolicyError if an untrusted file names code other than the factories of Jurybox's trainings.

    It is not enough that a name is in one of Jurybox's modules: it could be something that the module imports
    (``local_server:subprocess.run``), or a function that calls its argument (``played_environment`` of ``os:system``).
    """
    # Arguments first: of an algorithm of the user's own, that is its name, and the factory is the one of any such.
    for name, among in [*((argument, _ARGUMENT_MODULES) for argument in _factories(arguments)), (factory, places)]:
        module, _, attribute = name.partition(":")
        known = [place for place in among if f"{module}.".startswith(f"{place}.")] if attribute.isidentifier() else []
        made = getattr(import_module(module), attribute, None) if known else None
        if not any(f"{getattr(made, '__module__', '')}.".startswith(f"{place}.") for place in known):
            raise PolicyError(
                f"{where} names {name!r}, which is not code of Jurybox's policies and would be run: --trust allows it"
            )


def _factories(value: Any) -> Iterator[str]:
    """Yield every string in the arguments, at any depth, that may name code as "module:callable"."""
    if isinstance(value, str):
        if re.fullmatch(r"[\w.]+:.+", value):
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _factories(part)
    elif isinstance(value, Sequence):
        for part in value:
            yield from _factories(part)


def _weights(found: Found) -> dict[str, Tensor]:
    if found.where.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(found.where)
    path = found.where / found.acts.weights
    try:
        return {name: torch.from_numpy(array.copy()) for name, array in read_state(path)["state"].items()}
    except CheckpointError as error:
        raise PolicyError(f"the weights in {found.where} cannot be read: {error}") from error


def _digest(state: Mapping[str, Tensor]) -> str:
    sha256 = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha256.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def play(
    policy: Policy,
    episodes: int,
    *,
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
    frame: Callable[[Any], None] | None = None,
    ended: Callable[[Episode], None] = lambda episode: None,
) -> list[Episode]:
    """Play whole episodes. The environment and torch's generator are seeded with ``seed + i`` in episode i.

    Args:
        policy: the policy.
        episodes: number of episodes.
        seed: seed of the first episode.
        changes: arguments of the environment to override.
        frame: called with every frame, uint8 (height, width, 3); None: nothing is rendered.
        ended: called with every finished episode.

    Raises:
        PolicyError: frames are requested, but the environment does not render any.
    """
    drawn = torch.random.fork_rng(devices=[])  # leaves the caller's random state unchanged
    with drawn, policy.environment(changes, render=frame is not None) as environment:
        one = _OneEnvironment(environment, policy.mask)

        def chosen(waiting: Waiting) -> Any:
            if frame is not None:
                frame(_picture(environment))
            return [policy.act(waiting.observation, one.mask)]

        def over(episode: Episode) -> None:
            if frame is not None:
                frame(_picture(environment))
            ended(episode)

        seeds = range(seed, seed + episodes)
        begins = lambda episode: policy.begin()  # noqa: E731
        return play_episodes(one, seeds, chosen, begins=begins, ended=over, alive=interrupts.check)


class _OneEnvironment:
    """An environment as an `Adapter`: its observation as it gives it, actions in its own unit.

    Args:
        mask_of: the mask of actions that is due after a reset or a step with an info; None: the policy takes none.
    """

    name, bound, n, agents = "the environment", "bound them in a wrapper", 1, ("",)

    def __init__(self, environment: Environment, mask_of: Callable[[Any, Mapping[str, Any]], Array | None]) -> None:
        self._environment, self._mask_of = environment, mask_of
        self._seen: Any = None
        self.mask: Array | None = None

    def begin(self, environment: int, seed: int) -> None:
        torch.manual_seed(seed)
        self._seen, info = begun(self._environment.reset(seed=seed))
        self.mask = self._mask_of(self._environment, info)

    def waiting(self) -> Waiting:
        return Waiting("", self._seen, np.zeros(0))

    def step(self, actions: Array) -> Moved:
        action = as_action(actions[0], getattr(self._environment, "action_space", None))
        self._seen, reward, terminated, truncated, info = stepped(self._environment.step(action))
        if not (terminated or truncated):
            self.mask = self._mask_of(self._environment, info)
        flags = np.array([terminated]), np.array([truncated])
        result = Result("", np.array([reward]), flags[0], flags[1], np.zeros(0), [info])
        return Moved([result], 1, [0] if terminated or truncated else [])

    def close(self) -> None:
        self._environment.close()


def _picture(environment: Environment) -> Any:
    try:
        picture = environment.render()
    except Exception as error:  # rendering may raise anything, for example if a package is missing
        raise PolicyError(f"this environment cannot be rendered: {error}") from error
    if picture is None:
        raise PolicyError("this environment renders no pictures (render_mode rgb_array): play it without --video")
    return np.asarray(picture)


def score(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the mean return with its 95 % bootstrap interval, its deviation, and the episodes' number and length."""
    from jurybox.training.report.verdict import interval

    totals = [each.total for each in episodes]
    found = interval(totals) if len(totals) > 1 else None
    return {
        "episodes": len(totals),
        "return_mean": float(np.mean(totals)),
        "return_low": found.low if found else math.nan,
        "return_high": found.high if found else math.nan,
        "return_std": float(np.std(totals, ddof=1)) if len(totals) > 1 else math.nan,
        "length_mean": float(np.mean([each.length for each in episodes])),
    }


def remember_score(policy: Policy, run: Path, score: Mapping[str, Any]) -> None:
    """Save the result of an evaluation in the run's folder, for the card of an export."""
    if not run.is_dir():
        return
    path = run / SCORES
    known = _json(path) if path.is_file() else {}
    known.setdefault(policy.digest, []).append(dict(score))
    write_atomically(path, json.dumps(known, indent=1) + "\n")


def export(policy: Policy, to: Path, run: Path) -> list[Path]:
    """Write NAME.pt2, NAME.safetensors and NAME.md; return their paths.

    The program (`torch.export`) maps the environment's own observations (n, ...), for any n, to actions in its units;
    several inputs are given by position, in the order of the card. That of a recurrent policy takes its memory after
    them, zeros where an episode begins, and returns the action and the next memory. The
    safetensors file contains the weights and, in its metadata, the description, so that it can be played like a run.
    The .md file is a model card.

    Args:
        policy: the policy.
        to: NAME.pt2.
        run: the run's folder, with the scores of `remember_score`.

    Raises:
        PolicyError: the name does not end with .pt2, or torch.export cannot trace the network.
    """
    from safetensors.torch import save_file

    if to.suffix != ".pt2":
        raise PolicyError(f"{to}: expected a name that ends with .pt2; the weights and the card are written beside it")
    specs = [*policy.inputs.values(), *policy.served.state.values()]
    examples = tuple(torch.zeros((2, *spec.shape), dtype=getattr(torch, spec.dtype)) for spec in specs)
    rows = torch.export.Dim("rows", min=1, max=1 << 16)
    try:
        program = torch.export.export(policy.module, examples, dynamic_shapes=(tuple({0: rows} for _ in examples),))
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise PolicyError(f"torch.export cannot trace {policy.found.acts.network}: {first}") from error
    to.parent.mkdir(parents=True, exist_ok=True)
    weights, card = to.with_suffix(".safetensors"), to.with_suffix(".md")
    document = policy.found.description.as_dict()
    document["policies"] = {policy.found.name: {**document["policies"][policy.found.name], "weights": weights.name}}
    with _written_atomically(to) as scratch:
        torch.export.save(program, scratch)
    with _written_atomically(weights) as scratch:
        state = {name: tensor.contiguous().clone() for name, tensor in policy.served.module.state_dict().items()}
        save_file(state, scratch, {_METADATA: json.dumps(document), "digest": policy.digest})
    write_atomically(card, _card(policy, run, to, weights))
    return [to, weights, card]


@contextmanager
def _written_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path for the block to write to; rename it at the end of the block."""
    scratch = path.with_name(f".{path.name}.writing{path.suffix}")
    try:
        yield scratch
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _card(policy: Policy, run: Path, program: Path, weights: Path) -> str:
    found, description, acts = policy.found, policy.found.description, policy.found.acts
    given = {**policy.inputs, **policy.served.state}
    inputs = ", ".join(
        f"`{name}` {spec.dtype} ({', '.join(map(str, ('n', *spec.shape)))})" for name, spec in given.items()
    )
    each = []
    for name, (dtype, shape) in acts.tensors.items():
        text = ", ".join(map(str, ("n", *shape))) + "," * (not shape)
        each.append(f"`{name}` {dtype} ({text})" if acts.parts else f"{dtype} ({text})")
    bounds = "" if acts.choose in _NUMBERED else f", {_bounds_text(acts)}"
    action = ", ".join(each) + bounds
    if policy.recurrent:
        action += f", and the next `{MEMORY}`, which is zeros where an episode begins"
    scores = (_json(run / SCORES) if (run / SCORES).is_file() else {}).get(policy.digest, [])
    lines = [
        f"# A policy of `jurybox train {description.training}`",
        "",
        f"- `{program.name}`: `torch.export` program, observations as the environment gives them, {inputs}, to actions "
        f"{action}; encoding, normalisation and scaling are inside.",
        f"- `{weights.name}`: the weights of `{acts.network}`, with this description in its metadata.",
        f"- Environment: `{description.environment}` with {json.dumps(dict(description.environment_arguments))}",
        f"- Saved after {found.env_steps if found.env_steps is not None else 'unknown'} env steps, "
        f"seed {description.seed}; weights {policy.digest[:16]}",
        f"- Jurybox {description.version}, commit {description.commit or 'unknown'}",
        "",
        "## Scores",
        "",
        *(f"- {_score_line(score)}" for score in scores),
    ]
    if found.numbers:
        lines.append(f"- In training, of these weights: {json.dumps(dict(found.numbers))}")
    if not scores:
        lines.append("- None with an interval yet: `jurybox policy evaluate`, and export again.")
    lines += ["", "## Settings", "", "```json", json.dumps(dict(description.settings), indent=1), "```", ""]
    return "\n".join(lines)


def _bounds_text(acts: Acts) -> str:
    low, high = ([bound for bound in bounds if bound is not None] for bounds in (acts.low, acts.high))
    if len(low) < len(acts.low) or len(high) < len(acts.high) or not low:
        return "as the network gives them, within the bounds that there are" if low or high else "without bounds"
    return f"{min(low):g} to {max(high):g}"


def _score_line(score: Mapping[str, Any]) -> str:
    return (
        f"mean return {score['return_mean']:.4g} (95 %: {score['return_low']:.4g} to {score['return_high']:.4g}) over "
        f"{score['episodes']} episodes from seed {score.get('seed', 0)}"
    )


def served_config(policy: Policy, folder: Path, run: Path, server: Mapping[str, Any], name: str = "policy") -> Path:
    """Export a policy to `folder`, write the configuration of a server for it, and return the configuration's path."""
    export(policy, folder / "policy.pt2", run)
    acts = policy.found.acts
    lines = [
        "[server]",
        *(f"{key} = {json.dumps(value)}" for key, value in server.items()),
        f'[models."{name}"]',
        'exported = "policy.pt2"',
        f'[models."{name}".inputs]',
        *(
            f'{json.dumps(name)} = {{dtype = "{spec.dtype}", shape = {list(spec.shape)}}}'
            for name, spec in policy.inputs.items()
        ),
        f'[models."{name}".outputs]',
        *(
            f'{json.dumps(name)} = {{dtype = "{dtype}", shape = {list(shape)}}}'
            if acts.parts
            else f'{name} = {{dtype = "{dtype}", shape = {list(shape)}}}'
            for name, (dtype, shape) in acts.tensors.items()
        ),
        *([f'[models."{name}".state]'] if policy.recurrent else []),
        *(
            f'{json.dumps(key)} = {{dtype = "{spec.dtype}", shape = {list(spec.shape)}}}'
            for key, spec in policy.served.state.items()
        ),
    ]
    config = folder / "server.toml"
    write_atomically(config, "\n".join(lines) + "\n")
    return config
