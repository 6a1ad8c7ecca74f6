"""Access to sorrel models: the acting network, the memory, weights, and random states."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from jurybox.protocol.weights.reader import WeightsReader
from jurybox.training.replay import Field
from jurybox.training.roles.local_policy import TorchWeights

# Kinds of rows: a transition, or the beginning or end of an epoch.
TRANSITION, EPOCH_BEGINS, EPOCH_ENDS = 0, 1, 2
_EXTRA = "extra_"


def learned(agents: Sequence[Any]) -> dict[str, list[int]]:
    """Group the agents by their model; return their numbers by group name.

    Agents whose model cannot be trained (no module, or no memory of observations) are omitted.
    """
    groups: dict[int, list[int]] = {}
    for number, agent in enumerate(agents):
        if isinstance(agent.model, nn.Module) and hasattr(agent.model.memory, "obs_shape"):
            groups.setdefault(id(agent.model), []).append(number)
    return {"+".join(f"agent_{number}" for number in group): group for group in groups.values()}


def acting_part(model: Any) -> nn.Module:
    """Return the network that chooses actions, of which sorrel creates policy snapshots."""
    of_two = getattr(model, "models", None)
    if isinstance(of_two, Mapping) and isinstance(of_two.get("local"), nn.Module):
        found: nn.Module = of_two["local"]
        return found
    policy = getattr(model, "policy", None)
    if isinstance(policy, nn.Module):
        return policy
    assert isinstance(model, nn.Module)
    return model


def is_on_policy(model: Any) -> bool:
    """Return whether the model learns from whole epochs of its own policy (sorrel's RolloutBuffer)."""
    return hasattr(model.memory, "log_probs")


def fields_of(memory: Any) -> dict[str, Field]:
    """Return the fields of a replay row that holds an entry of a sorrel buffer."""
    return {
        "kind": Field((), "int32"),
        "epoch": Field((), "int64"),
        "observation": Field(tuple(int(size) for size in memory.obs_shape), "float32"),
        "action": Field((), "int64"),
        "log_probability": Field((), "float32"),
        "reward": Field((), "float32"),
        "done": Field((), "float32"),
        **{f"{_EXTRA}{name}": Field(array.shape[1:], array.dtype.name) for name, array in memory.extra_data.items()},
    }


class MemoryRecorder:
    """Copies what is added to a model's memory to a replay, for the model's learner.

    Args:
        add: the replay's `add`.
        model: the model; the `add` of its memory is wrapped.
    """

    def __init__(self, add: Any, model: Any) -> None:
        self._model = model
        self._write = add
        self._nothing = {name: np.zeros(field.shape, field.dtype) for name, field in fields_of(model.memory).items()}
        self._install()

    def mark(self, kind: int, epoch: int) -> None:
        """Mark the beginning or the end of an epoch."""
        self._install()
        self._write(**{**self._nothing, "kind": kind, "epoch": epoch})

    def _install(self) -> None:
        memory = self._model.memory
        if isinstance(getattr(memory.add, "recorder", None), MemoryRecorder):
            return
        keep = memory.add

        def add(obs: Any, action: Any, reward: Any, done: Any, **more: Any) -> None:
            keep(obs, action, reward, done, **more)
            chosen, log_probability = action if isinstance(action, tuple) else (action, 0.0)
            row = {
                **self._nothing,
                "observation": np.asarray(obs, np.float32).reshape(self._nothing["observation"].shape),
                "action": int(chosen),
                "log_probability": float(log_probability),
                "reward": float(reward),
                "done": float(done),
                **{f"{_EXTRA}{name}": np.asarray(value) for name, value in more.items()},
            }
            self._write(**row)

        add.recorder = self  # type: ignore[attr-defined]
        memory.add = add


def remember(model: Any, row: Mapping[str, Any]) -> None:
    """Add a transition that a `MemoryRecorder` wrote to a model's memory, as the agent did."""
    action = int(row["action"])
    more = {name.removeprefix(_EXTRA): value for name, value in row.items() if name.startswith(_EXTRA)}
    chosen = (action, float(row["log_probability"])) if is_on_policy(model) else action
    model.memory.add(row["observation"], chosen, float(row["reward"]), bool(row["done"]), **more)


class ModelWeights:
    """Updates an agent's model with the weights and epsilon that its learner publishes.

    Attributes:
        version: version of the weights in the model; 0 before the first update.
    """

    def __init__(self, reader: WeightsReader, model: Any) -> None:
        self._model = model
        self._weights = TorchWeights(reader, acting_part(model))
        self.version = 0

    def refresh(self, timeout: float = 1.0) -> bool:
        """Load the newest publication if it is newer than the model's; return whether it was. Raises Timeout."""
        if not self._weights.refresh(timeout):
            return False
        self.version = self._weights.version
        self._model.epsilon = self._weights.extra["epsilon"]
        if hasattr(self._model, "_version"):
            self._model._version += 1  # sorrel's threadsafe models act with a copy that they create for each version
        return True


class GlobalRandom:
    """Separate states of the global random generators of Python, NumPy and torch.

    Calling it returns a context manager: the block uses these states, and the previous ones are restored at its end.
    The next block continues where this one ended.
    """

    def __init__(self, seed: int) -> None:
        torch_random = torch.Generator().manual_seed(seed)
        numpy_random = np.random.RandomState(seed % 2**32)
        self._states: tuple[Any, Any, Any] = (
            random.Random(seed).getstate(),
            numpy_random.get_state(),
            torch_random.get_state(),
        )

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before = _states()
        _set_states(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _set_states(before)

    def state(self) -> dict[str, Any]:
        """The states, for a checkpoint."""
        python, numpy_state, torch_state = self._states
        return {"python": list(python), "numpy": list(numpy_state), "torch": torch_state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        version, numbers, gauss = state["python"]
        torch_state = torch.from_numpy(np.array(state["torch"], np.uint8))
        self._states = (version, tuple(numbers), gauss), tuple(state["numpy"]), torch_state


def _states() -> tuple[Any, Any, Any]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_states(states: tuple[Any, Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
