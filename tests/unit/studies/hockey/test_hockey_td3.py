"""Hockey's own update: TD3's, with gradients in closed form; and its mirrored batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.algorithms.acting import START, algorithm, spec_of
from tests.unit.algorithms.batches import batch

from jurybox.studies.hockey.game import MIRROR_ACTION, MIRROR_OBSERVATION
from jurybox.studies.hockey.td3 import mirrored

OWN = "jurybox.studies.hockey.td3:HockeyTD3"


@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradients_in_closed_form_are_those_of_autograd(weighted: bool) -> None:
    settings = {"hidden": (16, 8), "pre_tanh_penalty": 0.5, "critic_learning_rate": 2e-3, "reward_scale": 0.5}
    own, reference = (algorithm(name, spec_of(5, (), True, False, 2), **settings) for name in (OWN, "td3"))
    for made in (own, reference):
        made.setup(1, "cpu")
        with torch.no_grad():
            made.acting.layers[-1].weight.mul_(10)  # actions near their bounds, so that the penalty counts
            for network in (made.acting, made.critics, made.target_actor, made.target_critics):
                network.features.use(np.full(5, 1, np.float32), np.full(5, 0.3, np.float32))
    g = torch.Generator().manual_seed(0)
    for number, n in enumerate((64, 64, 64, 32, 64, 64)):  # another number of rows in between
        rows = batch(number, n)
        if weighted:
            rows["weights"] = torch.rand(n, generator=g)
        one, other = own.update(rows, START), reference.update(rows, START)
        assert one.metrics.keys() == other.metrics.keys()
        for name, value in one.metrics.items():
            torch.testing.assert_close(value, other.metrics[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(one.priorities, other.priorities, rtol=1e-4, atol=1e-6)
        for kind in ("critics", "acting") if number % 2 else ("critics",):
            networks = getattr(own, kind), getattr(reference, kind)
            for (name, p), q in zip(networks[0].named_parameters(), networks[1].parameters(), strict=True):
                torch.testing.assert_close(
                    p.grad, q.grad, rtol=1e-3, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
                )
    for kind in ("acting", "critics", "target_actor", "target_critics"):
        for p, q in zip(getattr(own, kind).parameters(), getattr(reference, kind).parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("observations", "actions"), [(18, 4), (16, 3)])
def test_every_second_row_of_a_batch_is_mirrored(observations: int, actions: int) -> None:
    rows = batch(0, 7, observations, actions)
    before = {name: each.clone() for name, each in rows.items()}
    found = mirrored(rows)
    assert found.keys() == before.keys()
    for name, factors in (
        ("observation", MIRROR_OBSERVATION), ("next_observation", MIRROR_OBSERVATION), ("action", MIRROR_ACTION)
    ):  # fmt: skip
        assert torch.equal(found[name][1::2], before[name][1::2])
        expected = before[name][::2].numpy() * factors[: before[name].shape[1]]
        np.testing.assert_array_equal(found[name][::2].numpy(), expected)
    assert torch.equal(found["reward"], before["reward"]) and torch.equal(found["discount"], before["discount"])
