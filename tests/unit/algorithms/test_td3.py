from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.algorithms.acting import START, algorithm, spec_of
from tests.unit.algorithms.batches import batch

from jurybox.training.algorithms.acting import NumpyActor
from jurybox.training.algorithms.networks import TwinCritic
from jurybox.training.checkpoints import read_state, write_state

SMALL = {"hidden": (32, 32), "learning_rate": 3e-3}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def td3(observations: int = 5, actions: int = 2, *, seed: int = 0, normalize: bool = False, **settings):
    made = algorithm("td3", spec_of(observations, (), normalize, False, actions), **{**SMALL, **settings})
    made.setup(seed, "cpu")
    return made


def weights(made) -> list[torch.Tensor]:
    return [value.clone() for value in (*made.acting.parameters(), *made.critics.parameters())]


@pytest.mark.runs
def test_it_finds_the_best_action_of_a_one_step_task() -> None:
    """The reward is highest where the action is tanh of a known function of the observation."""
    made = td3(2, 1, seed=1, pre_tanh_penalty=0.001)
    g = torch.Generator().manual_seed(0)
    for _ in range(700):
        observation = torch.rand(64, 2, generator=g) * 2 - 1
        action = torch.rand(64, 1, generator=g) * 2 - 1
        best = 0.8 * observation[:, :1]
        rows = {
            "observation": observation,
            "action": action,
            "reward": -(action - best).square().sum(-1),
            "discount": torch.zeros(64),
            "next_observation": observation,
        }
        made.update(rows, START)
    observation = torch.rand(200, 2, generator=g) * 2 - 1
    with torch.no_grad():
        error = (made.acting(observation) - 0.8 * observation[:, :1]).abs().mean()
    assert error < 0.1


def test_the_actor_and_the_targets_move_every_second_time_only() -> None:
    made = td3()
    actor = [p.clone() for p in made.acting.parameters()]
    target = [p.clone() for p in made.target_critics.parameters()]
    assert "actor_loss" not in made.update(batch(0), START).metrics
    assert all(torch.equal(a, b) for a, b in zip(actor, made.acting.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(target, made.target_critics.parameters(), strict=True))
    assert "actor_loss" in made.update(batch(1), START).metrics
    assert not any(torch.equal(a, b) for a, b in zip(actor, made.acting.parameters(), strict=True))
    for before, now, live in zip(target, made.target_critics.parameters(), made.critics.parameters(), strict=True):
        torch.testing.assert_close(now, before + 0.005 * (live - before))


def test_twin_critics_are_two_critics() -> None:
    critic = TwinCritic(3, 2, (16, 8))
    observation, action = torch.randn(10, 3), torch.randn(10, 2)
    values = critic(observation, action)
    assert values.shape == (2, 10)
    assert not torch.allclose(values[0], values[1])
    torch.testing.assert_close(critic.first(observation, action), values[0])
    for which in (0, 1):
        x = torch.cat((observation, action), -1)
        for number, layer in enumerate(critic.layers):
            x = x @ layer.weight[which] + layer.bias[which]
            x = x.relu() if number < 2 else x
        torch.testing.assert_close(values[which], x[:, 0])


@pytest.mark.parametrize("name", ["td3", "sac"])
def test_rows_of_weight_nothing_teach_the_critics_nothing(name) -> None:
    learned = []
    for reward in (0.0, 1e3):
        made = algorithm(name, spec_of(5, (), False, False, 2), **SMALL)
        made.setup(0, "cpu")
        counts = torch.ones(64)
        counts[32:] = 0.0
        rows = batch(0)
        rows |= {"reward": torch.where(counts > 0, rows["reward"], torch.tensor(reward)), "weights": counts}
        found = made.update(rows, START)
        assert found.priorities.shape == (64,), "errors, whatever their weight"
        learned.append(list(made.critics.parameters()))
    for p, q in zip(*learned, strict=True):
        torch.testing.assert_close(p, q)


def test_a_restored_learner_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight, resumed = (algorithm("td3", spec_of(5, (), False, False, 2), **SMALL) for _ in range(2))
    straight.setup(3, "cpu")
    resumed.setup(99, "cpu")
    for number in range(7):
        straight.update(batch(number), START)
    write_state(tmp_path / "learner.state", straight.state_dict())
    resumed.load_state_dict(read_state(tmp_path / "learner.state"))
    for number in range(7, 20):
        straight.update(batch(number), START)
        resumed.update(batch(number), START)
    assert resumed.updates == straight.updates == 20
    for a, b in zip(weights(straight), weights(resumed), strict=True):
        assert torch.equal(a, b)


def test_the_seed_decides_everything() -> None:
    first, same, other = (td3(seed=seed) for seed in (1, 1, 2))
    for made in (first, same, other):
        for number in range(4):
            made.update(batch(number), START)
    assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(same), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(weights(first)[:1], weights(other)[:1], strict=True))


def test_making_a_learner_leaves_torchs_own_chance_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    td3(seed=1)
    assert torch.equal(torch.rand(3), expected)


def test_published_weights_are_taken_over_beside_restored_critics_only() -> None:
    published = {name: torch.zeros_like(value) for name, value in td3().acting.state_dict().items()}
    made = td3()
    made.load_published(published, 10)
    assert any(parameter.any() for parameter in made.acting.parameters())
    made.restored = True
    made.load_published(published, 10)
    assert not any(parameter.any() for parameter in made.acting.parameters())


def test_the_numpy_actor_acts_as_the_torch_one() -> None:
    made = td3(18, 4, normalize=True, hidden=(128, 128))
    rows = np.random.default_rng(0).normal(2, 5, (50, 18)).astype(np.float32)
    rows[0, 0] = 1e3  # beyond the bound of normalised numbers
    made.acting.features.use(rows.mean(0), 1 / rows.std(0))
    with torch.no_grad():
        expected = made.acting(torch.from_numpy(rows)).numpy()
    state = {name: value.detach().numpy() for name, value in made.acting.state_dict().items()}
    np.testing.assert_allclose(NumpyActor(state)(rows), expected, atol=2e-5)
    assert not np.allclose(NumpyActor(state, clip=1.0)(rows), expected, atol=2e-5)
    with pytest.raises(ValueError, match=r"layers\.0\.weight"):
        NumpyActor({name: value for name, value in state.items() if "layers.0" not in name})


def test_exploration_is_noise_around_the_action_of_the_given_deviation_within_the_bounds() -> None:
    made = td3(action_noise=0.2)
    chosen = np.tile(np.float32([0.3, -0.9]), (20_000, 1))
    explored, columns = made.explore({"action": chosen}, np.random.default_rng(0), START)
    assert columns == {} and explored.dtype == np.float32 and explored.min() == -1.0
    assert explored[:, 0].mean() == pytest.approx(0.3, abs=0.01) and explored[:, 0].std() == pytest.approx(
        0.2, abs=0.01
    )
    np.testing.assert_array_equal(made.explore({"action": chosen}, np.random.default_rng(0), START)[0], explored)
