"""Which rows and weights shapes are compared with, and what the comparison leaves as it was."""

from __future__ import annotations

import math
from itertools import chain

import pytest
import torch
from torch import nn

from jurybox.protocol import TensorSpec
from jurybox.protocol.arena import Columns
from jurybox.server.engine.batch_shapes import drawn
from jurybox.server.engine.served import Served
from jurybox.server.models import ServedModel

NUMBER = TensorSpec("float32", ())


def compared(module, given=NUMBER, example=None, published=False, shapes=(1, 2, 4)):
    """The shapes that agree, after the module has been tried with each of them."""
    model = ServedModel(module, {"x": given}, {"y": NUMBER})
    columns = Columns.here(model.spec("m"), 8)
    served = Served("m", model, columns.inputs, columns.outputs, shapes[-1], columns=columns, shapes=shapes)
    served.published = published
    served.warm_up(example)
    return served.shapes


class Seen(nn.Module):
    """Notes the rows of each call, and computes the same for a row in any company."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, x):
        self.calls.append(x.tolist())
        return x.clone()


def test_every_row_is_compared_in_every_shape():
    seen = Seen()
    assert compared(seen) == (1, 2, 4)
    trials = [rows for rows in seen.calls if len(rows) == 4][1:]  # after the batch with which it is tried
    assert trials and all(len(set(rows)) == 4 for rows in trials)
    for shape in (1, 2):
        parts = [rows for rows in seen.calls if len(rows) == shape][1:]
        assert list(chain(*parts)) == list(chain(*trials)), "in their order, which is that of the trials"


@pytest.mark.parametrize("odd", range(4))
def test_a_shape_that_differs_on_one_row_only_is_not_used(odd):
    class Odd(nn.Module):
        """Computes one row of the example otherwise in pairs."""

        def forward(self, x):
            return torch.where((x == odd) & (len(x) == 2), x + 1, x)

    assert compared(Odd(), example=lambda rows: {"x": torch.arange(rows, dtype=torch.float32)}) == (1, 4)


def test_an_example_of_a_single_number_is_replaced_by_random_ones():
    seen = Seen()
    assert compared(seen, example=lambda rows: {"x": torch.ones(rows)}, shapes=(1,)) == (1,)
    assert seen.calls[0] == [1] and len({rows[0] for rows in seen.calls[1:]} - {1}) > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "bool"])
def test_random_rows_depend_on_their_generator_alone(dtype):
    spec = TensorSpec(dtype, (50,))
    before = torch.get_rng_state()
    first, again, other = (drawn(spec, 3, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


class Weighted(nn.Module):
    """Notes its weights whenever it computes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(75, 200)
        self.filters = nn.Parameter(torch.zeros(64, 3, 5, 5))
        self.register_buffer("variance", torch.ones(500))
        self.seen = []

    def weights(self):
        return {key: value.clone() for key, value in self.state_dict().items()}

    def forward(self, x):
        self.seen.append(self.weights())
        return x.clone()


def other(module):
    """The random weights with which a module was compared."""
    found = [weights for weights in module.seen if bool(weights["filters"].any())]
    assert 0 < len(found) < len(module.seen), "it is compared with its own weights, too"
    return found[0]


def test_other_weights_are_drawn_as_a_layers_are_initialised():
    """Much larger ones would saturate activations, whose results are then the same in any shape."""
    module = Weighted()
    compared(module, published=True)
    found = other(module)
    for weights in (found["layer.weight"], found["filters"]):
        bound = math.sqrt(3 / weights[0].numel())  # of the uniform distribution of variance 1 / inputs
        assert float(weights.abs().max()) <= bound * (1 + 1e-6)
        assert abs(float(weights.mean())) < 0.1 * bound
        assert float(weights.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_what_may_be_a_variance_is_only_made_a_little_larger():
    module = Weighted()
    compared(module, published=True)
    added = other(module)["variance"] - 1
    assert 0 <= float(added.min()) < 0.01 and 0.09 < float(added.max()) <= 0.1 + 1e-6


def test_other_weights_are_the_same_at_every_start_and_cost_no_random_numbers_of_the_models():
    before = torch.get_rng_state()
    first, again = Weighted(), Weighted()
    torch.set_rng_state(before)
    for module in (first, again):
        compared(module, published=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(other(first)["filters"], other(again)["filters"])


def test_shapes_are_compared_with_the_weights_that_a_model_came_with_too():
    class Fresh(nn.Module):
        """Computes otherwise in pairs until it is trained."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 1))

        def forward(self, x):
            return x + 1 if len(x) == 2 and not bool(self.weight.any()) else x.clone()

    assert compared(Fresh(), published=True) == (1, 4)


def test_a_module_is_told_of_the_other_weights_and_of_its_own_again():
    """It may keep what it has computed from them."""

    class Told(Weighted):
        def weights_changed(self):
            changes.append(self.weights())

    changes = []
    module = Told()
    own = module.weights()
    compared(module, published=True)
    random, restored = changes
    assert torch.equal(random["filters"], other(module)["filters"])
    assert all(torch.equal(restored[key], own[key]) for key in own)
