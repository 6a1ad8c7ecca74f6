"""Where the inputs of scores come from, for a model and for the members of a panel."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.server.test_row_scorer import Computes

from jurybox.protocol.errors import SpecMismatch
from jurybox.server.frontend.scores import RowScorer
from jurybox.server.frontend.threads import ThreadPool

PANEL = {"both": {"a": {"model": "m", "weight": 1.0}, "b": {"model": "m", "weight": 2.0}}}


def test_an_input_comes_from_the_column_that_the_settings_name():
    scorer = RowScorer(Computes(), ThreadPool(), model="m", inputs={"x": "column"}, timeout=20.0)
    assert list(asyncio.run(scorer.scores({"column": [1.0, 2.0], "x": [8.0, 9.0]}, 2))) == [1.0, 2.0]


def test_an_input_that_the_model_does_not_have_is_refused_and_may_be_that_of_another_member_of_a_panel():
    def scored(model):
        frontend = Computes(panels=PANEL)
        scorer = RowScorer(frontend, ThreadPool(), model=model, inputs={"x": "x", "of another": "x"}, timeout=20.0)
        return list(asyncio.run(scorer.scores({"x": [1.0, 2.0]}, 2)))

    assert scored("both") == [3.0, 6.0]
    with pytest.raises(SpecMismatch, match="model 'm' has no input of another"):
        scored("m")
