"""Models whose shapes cannot be compared, or are compared with the weights they have and no others; and random rows."""

from __future__ import annotations

import pytest
import torch
from tests.unit.engine.test_compared_shapes import Weighted, compared

from jurybox.protocol import TensorSpec
from jurybox.server.engine.batch_shapes import drawn

INDEX = TensorSpec("int64", ())


class Looks(torch.nn.Module):
    """Computes some indices otherwise in pairs."""

    def forward(self, x):
        return torch.where((x > 2) & (len(x) == 2), 1.0, 0.0)


def test_only_the_largest_shape_is_used_where_rows_are_indices_that_nobody_can_make_up():
    assert compared(Looks(), INDEX) == (4,)
    for most, shapes in ((2, (1, 2, 4)), (3, (1, 4))):
        found = compared(Looks(), INDEX, example=lambda rows, most=most: {"x": torch.arange(rows).clamp(max=most)})
        assert found == shapes


@pytest.mark.parametrize("rows", [1, 2])
def test_only_the_largest_shape_is_used_where_the_model_fails_on_rows_that_were_made_up(rows):
    class Fails(torch.nn.Module):
        def forward(self, x):
            if len(x) == rows and bool(x.any()):
                raise ValueError("expected nothing")
            return x.clone()

    assert compared(Fails()) == (4,)


def test_a_model_whose_weights_never_change_is_compared_with_those_alone():
    module = Weighted()
    own = module.weights()
    assert compared(module) == (1, 2, 4) and len(module.seen) > 2
    assert all(torch.equal(weights[key], own[key]) for weights in module.seen for key in own)


def test_random_bytes_are_of_all_values_and_random_truths_of_both():
    generator = torch.Generator().manual_seed(3)
    assert drawn(TensorSpec("uint8", (100,)), 100, generator).unique().tolist() == list(range(256))
    truths = drawn(TensorSpec("bool", (100,)), 100, generator).float()
    assert 0.45 < float(truths.mean()) < 0.55
