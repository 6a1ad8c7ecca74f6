"""Recurrent PPO: its memory, sequences and update, each held to its formulas, written out here once more."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tests.unit.algorithms.acting import START, algorithm, ready, spec_of
from tests.unit.algorithms.test_update_formulas import advantages, agree, follow, one_thread, widened  # noqa: F401

from jurybox.training.algorithms.base import AlgorithmUnusable, Rollout
from jurybox.training.algorithms.recurrent import Memory, StepSequences
from jurybox.training.algorithms.registry import make, tried
from jurybox.training.environments.gymnasium_env import Actions
from jurybox.training.roles.learner import rollout
from jurybox.training.spaces import MEMORY, ActionSpec, AgentSpec, Leaf

OBSERVATIONS, UNITS = 3, 5
T, N = 7, 3


def recurrent(cell: str, kind: str, seed: int = 5, **settings):
    """PPO with such a memory, of actions of this kind, ready to learn."""
    if kind == "numbers":
        spec = spec_of(OBSERVATIONS, (), False, False, 2)
    elif kind == "mixed":
        space = spaces.Tuple([spaces.MultiDiscrete((2, 3)), spaces.Box(-1.0, 1.0, (2,))])
        spec = AgentSpec((Leaf("observation", (OBSERVATIONS,), "float32"),), Actions(space).spec)
    elif kind == "choices":
        spec = AgentSpec((Leaf("observation", (OBSERVATIONS,), "float32"),), ActionSpec.choices((2, 3), (0, 0)))
    else:
        alone = (Leaf("observation", (OBSERVATIONS,), "float32"),)
        spec = AgentSpec(alone, ActionSpec(True, 4), masked=kind == "masks")
    given = {"learning_rate": 1e-2, "n_epochs": 3, "batch_size": 8, "ent_coef": 0.1, "gamma": 0.9, **settings}
    made = algorithm("ppo", spec, recurrent=cell, hidden_size=UNITS, hidden=(6,), **given)
    network = widened(made.seeded(made.network, 0))
    return ready(made, seed, network)


def stepped(layer, features: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of one row, gate by gate, in torch's order of the gates; its output and its next state."""
    own, back = layer.weight_ih_l0 @ features + layer.bias_ih_l0, layer.bias_hh_l0
    hidden = state[:UNITS]
    back = layer.weight_hh_l0 @ hidden + back
    if isinstance(layer, torch.nn.LSTM):
        (i, f, g, o), cell = (own + back).split(UNITS), state[UNITS:]
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        hidden = torch.sigmoid(o) * torch.tanh(cell)
        return hidden, torch.cat((hidden, cell))
    (r, z, n), (of_r, of_z, of_n) = own.split(UNITS), back.split(UNITS)
    reset, update = torch.sigmoid(r + of_r), torch.sigmoid(z + of_z)
    hidden = (1 - update) * torch.tanh(n + reset * of_n) + update * hidden
    return hidden, hidden


def outputs_of(network, seen: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of one row: what the policy chooses by, the value, and the next memory."""
    half = len(memory) // 2
    actor, one = stepped(network.actor_memory.layer, seen, memory[:half])
    critic, two = stepped(network.critic_memory.layer, seen, memory[half:])
    heads = network.heads
    return heads.actor(actor), heads.critic(critic)[0], torch.cat((one, two))


def log_prob_of(heads, chosen, action, mask) -> tuple[torch.Tensor, torch.Tensor]:
    """Logarithm of the probability of one action, and the policy's entropy."""
    if heads.counts and hasattr(heads, "log_std"):
        size, choices = sum(heads.counts), len(heads.counts)
        of_choices = log_prob_of(SimpleNamespace(counts=heads.counts), chosen[:size], action[:choices], mask)
        of_numbers = log_prob_of(
            SimpleNamespace(counts=(), log_std=heads.log_std), chosen[size:], action[choices:], None
        )
        return of_choices[0] + of_numbers[0], of_choices[1] + of_numbers[1]
    if hasattr(heads, "log_std"):
        normal = torch.distributions.Normal(chosen, heads.log_std.exp())
        return normal.log_prob(action).sum(), normal.entropy().sum()
    if mask is not None:
        chosen = chosen.masked_fill(~mask, -1e30)
    parts = chosen.split(heads.counts) if heads.counts else (chosen,)
    every = [torch.distributions.Categorical(logits=each) for each in parts]
    picked = action if heads.counts else action[None]
    entropy = sum(-(each.probs * each.probs.clamp_min(1e-30).log()).sum() for each in every)
    return sum(each.log_prob(one) for each, one in zip(every, picked, strict=True)), entropy


def rollout_of(learner, kind: str, seed: int = 0) -> Rollout:
    """Seven steps of three environments: one terminates and is truncated later, one goes on, one ends at once.

    What is remembered is any number: only that counts which a sequence begins with.
    """
    random, counts = np.random.default_rng(seed), learner.spec.action.counts
    terminated, ended = np.zeros((T, N), bool), np.zeros((T, N), bool)
    terminated[2, 0] = ended[2, 0] = ended[5, 0] = ended[0, 2] = True
    if kind == "numbers":
        action = random.normal(size=(T, N, 2)).astype(np.float32)
    else:
        action = random.integers(counts or 4, size=(T, N, len(counts)) if counts else (T, N))
    if kind == "mixed":
        action = np.concatenate((action, random.normal(size=(T, N, 2))), 2).astype(np.float32)
    mask = random.random((T, N, 4)) < 0.7
    np.put_along_axis(mask, action[..., None] if kind == "masks" else np.zeros((T, N, 1), int), True, 2)
    numbers = learner.remembers
    memory = random.normal(size=(T, N, numbers)).astype(np.float32)
    observation = random.normal(size=(T, N, OBSERVATIONS)).astype(np.float32)
    return Rollout(
        observation=observation,
        action=action,
        log_prob=random.normal(-1.4, 0.4, size=(T, N)).astype(np.float32),
        value=random.normal(size=(T, N)).astype(np.float32),
        reward=random.normal(size=(T, N)).astype(np.float32),
        terminated=terminated,
        ended=ended,
        next_value=random.normal(size=(T, N)).astype(np.float32),
        last_value=np.zeros(N, np.float32),
        mask=mask if kind == "masks" else None,
        memory=memory,
    )


def expected(network, batch: Rollout, s, seed: int):
    """The network after an update as sb3-contrib 2.9's RecurrentPPO makes it, one row after the other.

    The rows of all environments in order are turned by a random number, and cut into minibatches. A sequence begins
    with each, with each environment and after the end of each episode, with the memory that was recorded there.
    """
    network = copy.deepcopy(network)
    optimiser = torch.optim.Adam(network.parameters(), s.learning_rate, betas=s.betas, eps=s.adam_eps)
    of = lambda array: torch.from_numpy(np.concatenate([array[:, column] for column in range(N)]))  # noqa: E731
    gains = of(advantages(batch, s)).float()
    returns, memory = gains + of(batch.value), of(batch.memory)
    begins = of(np.concatenate((np.ones((1, N), bool), batch.ended[:-1])))
    seen, actions, old = of(batch.observation), of(batch.action), of(batch.log_prob)
    masks = None if batch.mask is None else of(batch.mask)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(s.n_epochs):
        first = int(torch.randint(T * N, (1,), generator=generator))
        order = [*range(first, T * N), *range(first)]
        for at in range(0, T * N, s.batch_size):
            rows, found, state = order[at : at + s.batch_size], [], torch.zeros(0)
            for place, row in enumerate(rows):
                state = memory[row] if place == 0 or begins[row] else state
                chosen, value, state = outputs_of(network, seen[row], state)
                mask = None if masks is None else masks[row]
                found.append((*log_prob_of(network.heads, chosen, actions[row], mask), value))
            log_probs, entropies, values = (torch.stack(each) for each in zip(*found, strict=True))
            ratio, gain = torch.exp(log_probs - old[rows]), gains[rows]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            low, high = 1 - s.clip_range, 1 + s.clip_range
            policy_loss = -torch.minimum(ratio * gain, ratio.clamp(low, high) * gain).mean()
            loss = (
                policy_loss + 0.5 * s.vf_coef * ((values - returns[rows]) ** 2).mean() - s.ent_coef * entropies.mean()
            )
            follow(optimiser, loss, s.max_grad_norm)
    return network


@pytest.mark.parametrize(
    ("cell", "kind"),
    [
        ("gru", "one"),
        *(("lstm", kind) for kind in ("mixed", "masks")),
        *(pytest.param("lstm", kind, marks=pytest.mark.runs) for kind in ("choices", "numbers")),
    ],
)
def test_recurrent_ppos_update_is_that_of_its_formulas(cell, kind) -> None:
    learner = recurrent(cell, kind)
    batch, before = rollout_of(learner, kind), copy.deepcopy(learner.acting)
    wanted = expected(before, batch, learner.rules, 5)
    learner.update(batch, START)
    agree(learner.acting, wanted)
    assert learner.gradient_steps == 3 * 3
    with pytest.raises(AssertionError):  # of other cuts: sequences begin elsewhere, with what was remembered there
        agree(expected(before, batch, learner.rules, 6), wanted)


def test_only_steps_that_are_valid_are_learned_from_and_their_sequences_begin_where_others_are_left_out() -> None:
    learner, same = recurrent("lstm", "one", batch_size=64), recurrent("lstm", "one", batch_size=64)
    batch = rollout_of(learner, "one")
    batch.valid = np.ones((T, N), bool)
    batch.valid[3:, 1] = False  # what is left out has ended, and so has what precedes it
    batch.ended[2:, 1] = True
    learner.update(batch, START)
    batch.observation[3:, 1] = batch.memory[3:, 1] = 7.0
    same.update(batch, START)
    agree(learner.acting, same.acting)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_steps_one_by_one_are_those_of_whole_sequences(cell) -> None:
    memory = Memory(cell, OBSERVATIONS, UNITS)
    seen, state = torch.randn(4, 6, OBSERVATIONS), torch.randn(4, memory.numbers)
    whole = memory.unrolled(seen, state)
    for step in range(6):
        by_hand = [stepped(memory.layer, seen[row, step], state[row]) for row in range(4)]
        found, state = memory(seen[:, step], state)
        torch.testing.assert_close(found, whole[:, step], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found, torch.stack([each[0] for each in by_hand]), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(state, torch.stack([each[1] for each in by_hand]), rtol=1e-4, atol=1e-6)


def test_sequences_are_padded_and_come_back_in_order() -> None:
    sequences = StepSequences(torch.tensor([True, False, False, True, True, False]))
    rows = torch.arange(6.0)[:, None]
    padded = sequences.padded(rows)
    assert padded[..., 0].tolist() == [[0, 1, 2], [3, 0, 0], [4, 5, 0]]
    assert sequences.rows(padded).tolist() == rows.tolist()


class Remembers:
    """Values of observations: their number and what is remembered, which doubles with each step."""

    def values(self, observation, memory=None):
        return (observation[:, 0] + memory[:, 0]).astype(np.float32)

    def remembered(self, observation, memory):
        return 2 * memory


def test_what_follows_a_truncated_episode_is_valued_with_what_was_remembered_then() -> None:
    n = 4
    rows = {
        "observation": np.zeros((n, 1), np.float32),
        "next_observation": np.full((n, 1), 10, np.float32),
        MEMORY: np.array([[0.0], [1.0], [2.0], [0.0]], np.float32),
        "terminated": np.array([False, False, False, True]),
        "ended": np.array([False, False, True, True]),
        "environment": np.zeros(n, np.int64),
        "t": np.array([1, 2, 3, 5]),
        **{name: np.zeros(n, np.float32) for name in ("reward", "log_prob", "action", "updates")},
    }
    found = rollout(rows, Remembers())
    assert found.value[:, 0].tolist() == [0, 1, 2, 0]
    assert found.next_value[:, 0].tolist() == [0, 0, 14, 0]
    assert found.memory is not None and found.memory[..., 0].tolist() == [[0], [1], [2], [0]]


@pytest.mark.parametrize("kind", ["one", "choices", "numbers", "mixed", "masks"])
def test_it_is_consistent_with_what_it_says_of_itself(kind) -> None:
    made = recurrent("lstm", kind)
    assert made.remembers == 4 * UNITS and recurrent("gru", kind).remembers == 2 * UNITS
    tried(made, np.zeros((3, OBSERVATIONS), np.float32))


def test_a_network_that_returns_no_memory_is_refused() -> None:
    spec = spec_of(OBSERVATIONS, (), False, True, 4)
    made = make("ppo", {"recurrent": "gru", "hidden_size": 4}, spec.as_dict())
    forward = type(made.network()).forward
    network = made.network()
    network.forward = lambda *seen: forward(network, *seen)[:-1]
    made.network = lambda: network
    with pytest.raises(AlgorithmUnusable, match="2 tensors, and `outputs` names logits, value, and `remembers`"):
        tried(made, np.zeros((3, OBSERVATIONS), np.float32))
