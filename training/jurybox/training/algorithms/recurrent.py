"""Networks that remember: an LSTM or GRU between the first layer and the hidden ones, and sequences to learn from.

What a network remembers of an episode is one row of numbers, its *memory*: zeros at the beginning, then what the step
before has returned. Whoever acts keeps it, a replay has it as the column "memory", and a server keeps it for each
session. Policy and value have one each, as in sb3-contrib's RecurrentPPO.

From a replay networks learn as R2D2 does (S. Kapturowski et al., "Recurrent Experience Replay in Distributed
Reinforcement Learning", ICLR 2019): windows of episodes begin with the memory that was stored there, and the first
steps, the burn-in, only bring it up to date with the weights of now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from jurybox.training.algorithms.networks import (
    ActorCritic,
    DeterministicActor,
    Features,
    Given,
    QuantileValues,
    QValues,
    SquashedGaussianActor,
    parted,
)
from jurybox.training.spaces import MASK, MEMORY

__all__ = [
    "Memory", "Recurrent", "RecurrentActorCritic", "RecurrentDeterministicActor", "RecurrentQValues",
    "RecurrentQuantileValues", "RecurrentSquashedGaussianActor", "StepSequences", "Torso", "Windowed", "rows_of",
]  # fmt: skip

Cell = Literal["lstm", "gru"]


class Memory(nn.Module):
    """A layer of an LSTM (Hochreiter and Schmidhuber, 1997) or GRU (Cho et al., 2014, arXiv:1406.1078).

    Args:
        cell: which of them.
        inputs: features of an observation.
        size: its units.

    Attributes:
        numbers: that it remembers: the hidden state, and of an LSTM the cell state after it.
    """

    def __init__(self, cell: Cell, inputs: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.layer = (
            nn.LSTM(inputs, size, batch_first=True) if cell == "lstm" else nn.GRU(inputs, size, batch_first=True)
        )
        self.numbers = 2 * size if cell == "lstm" else size

    def forward(self, features: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Make a step: features (n, inputs) and the memory (n, numbers) to (n, size), and to the next memory."""
        layer = self.layer
        weights: Any = layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0
        if isinstance(layer, nn.GRU):
            hidden = torch.gru_cell(features, memory, *weights)
            return hidden, hidden
        hidden, cell = torch.lstm_cell(features, (memory[:, : self.size], memory[:, self.size :]), *weights)
        return hidden, torch.cat((hidden, cell), 1)

    def unrolled(self, features: Tensor, memory: Tensor) -> Tensor:
        """Make all steps of sequences: (s, steps, inputs), and their first memory (s, numbers), to (s, steps, size)."""
        first: Any = memory[None]
        if isinstance(self.layer, nn.LSTM):
            first = first[..., : self.size].contiguous(), first[..., self.size :].contiguous()
        found: Tensor = self.layer(features, first)[0]
        return found


class StepSequences:
    """Rows (n, ...) in order that are several sequences, one after the other.

    Args:
        starts: bool (n,), the rows that begin a sequence; the first one does.
    """

    def __init__(self, starts: Tensor) -> None:
        first = starts.nonzero()[:, 0]
        self._of = starts.cumsum(0) - 1
        self._step = torch.arange(len(starts), device=starts.device) - first[self._of]
        self._shape = len(first), int(self._step.max()) + 1

    def padded(self, rows: Tensor) -> Tensor:
        """Rows (n, ...) as (sequences, steps, ...), zeros where a sequence is shorter."""
        return rows.new_zeros(*self._shape, *rows.shape[1:]).index_put((self._of, self._step), rows)

    def rows(self, padded: Tensor) -> Tensor:
        """The reverse of `padded`."""
        return padded[self._of, self._step]


class RecurrentActorCritic(nn.Module):
    """Of recurrent PPO: rows and a memory to the outputs of an `ActorCritic`, and the memory after the step.

    Args:
        features: the first layer.
        heads: makes what is behind the memories.
        cell, size: see `Memory`.

    Attributes:
        numbers: that it remembers, the policy's before the value's.
    """

    def __init__(self, features: Features, heads: Callable[[Given], ActorCritic], cell: Cell, size: int) -> None:
        super().__init__()
        self.features = features
        self.actor_memory = Memory(cell, features.size, size)
        self.critic_memory = Memory(cell, features.size, size)
        self.heads = heads(Given(size))
        self.numbers = self.actor_memory.numbers + self.critic_memory.numbers

    def forward(self, *seen: Tensor) -> tuple[Tensor, ...]:
        """The outputs, and the next memory (n, numbers); the last argument is the memory, after a mask."""
        parts, mask = parted(seen[:-1], self.heads.masked)
        found = self.features(*parts)
        of_actor, of_critic = self._parted(seen[-1])
        actor, next_actor = self.actor_memory(found, of_actor)
        critic, next_critic = self.critic_memory(found, of_critic)
        return *self.heads.decided(actor, critic, mask), torch.cat((next_actor, next_critic), 1)

    def value(self, observation: Tensor, memory: Tensor) -> Tensor:
        """Values (n,) alone."""
        found: Tensor = self.critic_memory(self.features(observation), self._parted(memory)[1])[0]
        value: Tensor = self.heads.critic(found).squeeze(-1)
        return value

    def remembered(self, observation: Tensor, memory: Tensor) -> Tensor:
        """The next memory (n, numbers) alone."""
        found, memories = self.features(observation), (self.actor_memory, self.critic_memory)
        after = [each(found, part)[1] for each, part in zip(memories, self._parted(memory), strict=True)]
        return torch.cat(after, 1)

    def scores(
        self, observation: Tensor, actions: Tensor, mask: Tensor | None, memory: Tensor, starts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of actions that were taken: logarithms of their probabilities, entropies of the policy, values; (n,) each.

        Args:
            observation: (n, ...) rows of sequences, one after the other.
            memory: (n, numbers), of which those count that a sequence begins with.
            starts: bool (n,), see `StepSequences`.
        """
        sequences = StepSequences(starts)
        found = sequences.padded(self.features(observation))
        memories = (self.actor_memory, self.critic_memory)
        each = [
            sequences.rows(one.unrolled(found, first))
            for one, first in zip(memories, self._parted(memory[starts]), strict=True)
        ]
        return self.heads.scored(self.heads.decided(each[0], each[1], mask), actions, mask)

    def _parted(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The policy's and the value's part of a memory."""
        first = self.actor_memory.numbers
        return memory[:, :first], memory[:, first:]


# ---- from a replay


@dataclass(frozen=True, slots=True)
class Windowed:
    """What a network behind a `Torso` takes instead of rows of observations: rows of windows, in their episodes.

    Attributes:
        observation: (windows, burn-in + steps, ...).
        memory: (windows, numbers), what was remembered before the first row that is there.
        there: bool (windows, burn-in), the rows of the burn-in that are there; the last of them, if any.
        window, step: int64 (n,) of the rows that outputs are for: where they are, steps counted after the burn-in.
    """

    observation: Tensor
    memory: Tensor
    there: Tensor
    window: Tensor
    step: Tensor


def rows_of(windows: Mapping[str, Tensor], burn_in: int, gamma: float) -> dict[str, Any]:
    """The rows of an update, n of them, from windows of a replay: all that are there after the burn-in.

    Args:
        windows: columns (windows, burn-in + steps, ...) by name, and "valid", which of these rows are there; of
            "observation" and the mask there is a step more, what followed the last.

    Returns:
        Of `Algorithm.update`: "observation" and "next_observation" are `Windowed`, the other columns (n, ...).
    """
    there, learned = windows["valid"].bool().tensor_split((burn_in,), 1)
    window, step = learned.nonzero(as_tuple=True)
    every = torch.arange(len(there), device=there.device)
    memory = windows[MEMORY][every, burn_in - there.sum(1)]
    observation, at = windows["observation"], burn_in + step
    found: dict[str, Any] = {name: windows[name][window, at] for name in ("action", "reward")}
    found["discount"] = gamma * (~windows["terminated"][window, at].bool()).float()
    found["observation"] = Windowed(observation[:, :-1], memory, there, window, step)
    found["next_observation"] = Windowed(observation, memory, there, window, step + 1)
    if MASK in windows:
        found |= {MASK: windows[MASK][window, at], f"next_{MASK}": windows[MASK][window, at + 1]}
    return found


class Torso(Given):
    """A first layer and a memory, in the place of a network's first layer.

    Args:
        features: the first layer.
        cell, size: see `Memory`.
        first: number of this memory's first among those that are remembered.

    Attributes:
        size: features that the network behind it gets.
    """

    def __init__(self, features: Features, cell: Cell, size: int, first: int = 0) -> None:
        super().__init__(size)
        self.features, self.memory = features, Memory(cell, features.size, size)
        self._part = slice(first, first + self.memory.numbers)

    def forward(self, seen: Any) -> Tensor:
        """Features (n, size): of rows in windows, or those that `step` has returned, as they are."""
        return self._of(seen) if isinstance(seen, Windowed) else seen

    def step(self, parts: Sequence[Tensor], memory: Tensor) -> tuple[Tensor, Tensor]:
        """Make a step: rows or inputs of observations, and all that is remembered, to features and its own part."""
        found: tuple[Tensor, Tensor] = self.memory(self.features(*parts), memory[:, self._part])
        return found

    def _of(self, seen: Windowed) -> Tensor:
        n, burn_in = seen.there.shape
        memory = seen.memory[:, self._part]
        if burn_in:
            with torch.no_grad():
                found = self.features(seen.observation[:, :burn_in].flatten(0, 1)).unflatten(0, (n, burn_in))
                for step in range(burn_in):
                    after = self.memory(found[:, step], memory)[1]
                    memory = torch.where(seen.there[:, step, None], after, memory)
        found = self.features(seen.observation[:, burn_in:].flatten(0, 1)).unflatten(0, (n, -1))
        return self.memory.unrolled(found, memory)[seen.window, seen.step]


class Recurrent(nn.Module):
    """What makes a network recurrent whose first layer is a `Torso`: the base beside the network's own class.

    Args:
        torsos: its own, and those of values that are learned with it: what those remember is kept with the rest.
        of, options: what the network's class takes after its first layer.
    """

    def __init__(self, torsos: Sequence[Torso], *of: Any, **options: Any) -> None:
        super().__init__(torsos[0], *of, **options)
        self.beside = nn.ModuleList(torsos[1:])

    def forward(self, *seen: Any) -> Any:
        """The network's outputs for rows that are `Windowed`; for others, whose memory is the last argument, a tuple
        of the outputs and the next memory (n, numbers)."""
        if isinstance(seen[0], Windowed):
            return super().forward(*seen)
        parts, mask = parted(seen[:-1], getattr(self, "masked", False))
        torsos: Any = (self.features, *self.beside)
        steps = [torso.step(parts, seen[-1]) for torso in torsos]
        outputs = super().forward(steps[0][0], *(() if mask is None else (mask,)))
        memory = torch.cat([after for _, after in steps], 1)
        return *(outputs if isinstance(outputs, tuple) else (outputs,)), memory


class RecurrentQValues(Recurrent, QValues):
    """`QValues` that remember."""


class RecurrentQuantileValues(Recurrent, QuantileValues):
    """`QuantileValues` that remember."""


class RecurrentDeterministicActor(Recurrent, DeterministicActor):
    """A `DeterministicActor` that remembers."""


class RecurrentSquashedGaussianActor(Recurrent, SquashedGaussianActor):
    """A `SquashedGaussianActor` that remembers."""
