"""Views of weights that functions of a module hold, and what is no module at all."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from jurybox.server.engine.modules import unready, views_of_weights


def multiplies(x, by):
    return x * by


def closing_over(view):
    """A function of two variables around it, of which one has no value yet."""
    if view is None:
        later = 1

    def multiply(x):
        return x * view + later

    return multiply


@pytest.mark.parametrize(
    ("keep", "place"),
    [
        (closing_over, "kept.multiply"),
        (lambda view: partial(multiplies, by=view), "kept.keywords.by"),
        (lambda view: partial(multiplies, view), "kept.args.0"),
        (lambda view: partial(closing_over(view), 1), "kept.func.multiply"),
    ],
    ids=["closure", "keyword", "argument", "function"],
)
def test_a_view_of_a_weight_that_a_function_holds_is_found(keep, place):
    module = torch.nn.Linear(2, 2)
    module.kept = keep(module.weight.data[1:])
    assert views_of_weights(module) == [place]
    module.kept = keep(torch.ones(2))
    assert views_of_weights(module) == []


@pytest.mark.parametrize(("module", "kind"), [(lambda x: x, "function"), (torch.nn.Linear, "type"), (None, "NoneType")])
def test_what_is_no_module_cannot_be_served_and_is_named(module, kind):
    assert unready(module) == f"its module is a {kind}, expected a torch.nn.Module"
