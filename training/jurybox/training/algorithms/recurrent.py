"""Networks that remember: an LSTM or GRU between the first layer and the hidden ones, and sequences to learn from.

What a network remembers of an episode is one row of numbers, its *memory*: zeros at the beginning, then what the step
before has returned. Whoever acts keeps it, a replay has it as the column "memory", and a server keeps it for each
session. Policy and value have one each, as in sb3-contrib's RecurrentPPO.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from jurybox.training.algorithms.networks import ActorCritic, Features, Given, parted

__all__ = ["Memory", "RecurrentActorCritic", "StepSequences"]

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
