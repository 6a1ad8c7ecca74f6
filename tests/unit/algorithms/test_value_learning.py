"""DQN and IQN learn what a small problem's values are, and go on exactly where they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.algorithms.acting import learning, spec_of

from jurybox.training.algorithms.base import Progress
from jurybox.training.algorithms.iqn import quantile_loss
from jurybox.training.checkpoints import read_state, write_state

torch.set_num_threads(1)  # threads of networks this small wait for each other more than they compute
SETTINGS = {"learning_rate": 0.003, "train_freq": 1, "target_update_interval": 50, "hidden": (32, 32)}
KINDS = ("dqn", "iqn")


def make(kind, seed=0):
    return learning(kind, spec_of(4, (), False, True, 2), seed=seed, **SETTINGS)


def updated(learner, rows):
    """Make an update after as many env steps, and return its loss."""
    given = {name: torch.from_numpy(column) for name, column in rows.items()}
    return float(learner.update(given, Progress(learner.updates, 1000)).metrics["loss"])


def batch(random, n=64):
    """Four states in a row; the reward is 1 at the right end and 0 elsewhere; the discount is 0.5."""
    place, action = random.integers(4, size=n), random.integers(2, size=n)
    over = (place == 3) & (action == 1)
    after = np.clip(place + 2 * action - 1, 0, 3)
    eye = np.eye(4, dtype=np.uint8)
    return {
        "observation": eye[place],
        "next_observation": eye[after],
        "action": action.astype(np.int32),
        "reward": over.astype(np.float32),
        "discount": np.where(over, 0, 0.5).astype(np.float32),
    }


@pytest.mark.runs
@pytest.mark.parametrize("kind", ["dqn", "iqn"])
def test_the_values_of_a_small_problem_are_found(kind):
    learner, random = make(kind), np.random.default_rng(0)
    for _ in range(400):
        updated(learner, batch(random))
    eye = torch.eye(4)
    values = learner.acting(eye).detach().numpy()
    assert np.allclose(values[:, 1], [0.125, 0.25, 0.5, 1.0], atol=0.06)
    assert (values[:, 1] > values[:, 0]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_learner_continues_bit_for_bit(kind, tmp_path):
    one, random = make(kind), np.random.default_rng(0)
    for _ in range(20):
        updated(one, batch(random))
    write_state(tmp_path / "learner.state", one.state_dict())
    two = make(kind, seed=5)
    two.load_state_dict(read_state(tmp_path / "learner.state"))
    for _ in range(35):  # beyond the next move of the target
        rows = batch(random)
        assert updated(one, rows) == updated(two, rows)
    assert all(torch.equal(a, b) for a, b in zip(one.acting.parameters(), two.acting.parameters(), strict=True))


def test_the_quantile_loss_is_least_at_the_quantiles():
    wanted = torch.tensor([[0.0] * 9 + [10.0] * 1] * 2)
    taus = torch.tensor([[0.5, 0.95]] * 2)
    at_quantiles = quantile_loss(torch.tensor([[0.0, 10.0]] * 2), taus, wanted)
    for other in ([1.0, 10.0], [0.0, 8.0], [5.0, 5.0]):
        assert quantile_loss(torch.tensor([other] * 2), taus, wanted) > at_quantiles
