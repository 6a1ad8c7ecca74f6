"""Scores for dialects: a row without one has a reason, never a number, and costs others nothing."""

from __future__ import annotations

import asyncio
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest

from jurybox.client.juror import Passing
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.errors import Busy, Code, ModelFailed, Refused, RowFailed, ServerGone, SpecMismatch, Timeout
from jurybox.protocol.spec import VARIABLE
from jurybox.server.frontend.frontend import Frontend
from jurybox.server.frontend.requests import RowsReply, RowsRequest
from jurybox.server.frontend.scores import RowScorer
from jurybox.server.frontend.threads import ThreadPool
from jurybox.server.security.access import OF_CONNECTION

SPEC = ModelSpec("m", {"x": TensorSpec("float32", ())}, {"score": TensorSpec("float32", ())})


class Computes:
    """A frontend that answers with its rows, and may fail before."""

    def __init__(self, fails=lambda model, rows: None, panels=None):
        self.panels, self.fails, self.asked, self.patient = panels or {}, fails, [], set()
        self.clients: set[object] = set()

    async def spec(self, model, until, priority, *, patient):
        return SPEC

    async def compute(self, request):
        inputs, n, self.bytes = request.read(SPEC, False)
        self.asked.append(n)
        self.clients.add(request.client)
        self.patient.add(request.patient)
        reply = self.fails(request.model, inputs["x"])
        if isinstance(reply, Exception):
            raise reply
        return reply or RowsReply({"score": inputs["x"]}, 7, SPEC)


def scores(frontend, values, **settings):
    scorer = RowScorer(frontend, ThreadPool(), **{"model": "m", "timeout": 20.0, **settings})
    return asyncio.run(scorer.scores({"x": values}, len(values)))


def test_rows_are_scored_in_their_order_with_the_weights_version():
    frontend = Computes()
    found = scores(frontend, [1.0, 2.0, 3.0])
    assert (list(found), found.version, frontend.asked, frontend.patient) == ([1.0, 2.0, 3.0], 7, [3], {True})


def test_rows_that_do_not_fit_are_not_sent_and_say_why():
    frontend = Computes()
    found = scores(frontend, [1.0, "no number", 3.0])
    assert found[0] == 1.0 and found[2] == 3.0 and isinstance(found[1], str) and not isinstance(found[1], Passing)
    assert frontend.asked == [2]
    with pytest.raises(SpecMismatch, match="not one of 2 rows fits"):
        scores(frontend, ["a", "b"])


@pytest.mark.parametrize("error", [ModelFailed("it broke"), Refused("too large", Code.TOO_LARGE)])
def test_a_row_that_makes_the_model_fail_costs_no_other_its_score(error):
    found = scores(Computes(lambda _, rows: error if 3.0 in rows else None), [float(i) for i in range(8)])
    assert found[3] == str(error) and [found[i] for i in range(8) if i != 3] == [0.0, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0]


def test_failed_rows_and_scores_that_are_no_numbers_have_reasons():
    def fails(_, rows):
        error = RowFailed("some failed", errors={1: "no face"})
        return RowsReply({"score": np.float32([1.0, 9.0, np.nan, np.inf])}, 3, SPEC, error)

    assert list(scores(Computes(fails), [0.0] * 4)) == [1.0, "no face", "the score is nan", "the score is inf"]


@pytest.mark.parametrize("error", [Timeout("late"), Busy("full"), ServerGone("gone")])
def test_what_may_pass_is_said_to_be_so(error):
    found = scores(Computes(lambda *_: error), [1.0, 2.0])
    assert list(found) == [str(error)] * 2 and all(isinstance(why, Passing) for why in found)


def test_other_refusals_are_raised():
    with pytest.raises(Refused, match="stopping"):
        scores(Computes(lambda *_: Refused("stopping", Code.DRAINING)), [1.0])


def test_rows_made_for_another_spec_are_refused_and_never_computed():
    class Reloaded(Computes):
        async def compute(self, request):
            other = ModelSpec("m", {"x": TensorSpec("int64", ())}, SPEC.outputs)
            return request.read(other, False)

    with pytest.raises(SpecMismatch, match="has changed"):
        scores(Reloaded(), [1.0])


PANEL = {"both": {name: {"model": name, "output": None, "weight": weight} for name, weight in (("a", 0.5), ("b", 2))}}


class Threads(ThreadPool):
    """Counts what it runs."""

    ran = 0

    async def run(self, action):
        self.ran += 1
        return action()


@pytest.mark.parametrize(
    ("columns", "in_a_thread"),
    [
        ({"x": [1.0] * 256}, False),
        ({"x": [1.0] * 257}, True),
        ({"x": [1.0], "unused": [np.zeros(2 << 20, np.uint8)]}, False),
        ({"x": [1.0], "unused": [np.zeros((2 << 20) + 1, np.uint8)]}, True),
        ({"x": [1.0, 2.0], "text": ["a" * (1 << 20)] * 2, "bytes": [b"", b"a"]}, True),
        ({"x": [1.0, 2.0], "text": ["a" * (1 << 20)] * 2, "bytes": [b"", None]}, False),
    ],
    ids=["256 rows", "257 rows", "2 MiB", "2 MiB and a byte", "texts and bytes", "texts"],
)
async def test_many_or_large_rows_are_made_in_a_thread(columns, in_a_thread):
    pool, frontend = Threads(), Computes()
    n = len(columns["x"])
    found = await RowScorer(frontend, pool, model="m").scores(columns, n)
    assert list(found) == columns["x"] and frontend.asked == [n]
    assert pool.ran == in_a_thread
    assert frontend.bytes == 8 * n  # of the answer


async def test_requests_are_those_of_the_connection_that_asked():
    frontend, client = Computes(), object()
    token = OF_CONNECTION.set(client)
    try:
        await RowScorer(frontend, ThreadPool(), model="m").scores({"x": [1.0]}, 1)
    finally:
        OF_CONNECTION.reset(token)
    assert frontend.clients == {client}


async def test_rows_of_inputs_of_any_size_stay_apart():
    class Texts(Computes):
        async def spec(self, model, until, priority, *, patient):
            return ModelSpec("m", {"x": TensorSpec("float32", (VARIABLE,), capacity=4)}, SPEC.outputs)

        async def compute(self, request):
            given = request.read(await self.spec("m", 0, 0, patient=True), False).inputs["x"]
            return RowsReply({"score": np.float32([len(row) for row in given])}, 7, SPEC)

    rows = [np.zeros(3, np.float32), np.zeros(1, np.float32)]
    assert list(await RowScorer(Texts(), ThreadPool(), model="m").scores({"x": rows}, 2)) == [3.0, 1.0]


async def test_rows_are_leased_for_a_model_or_all_members_of_a_panel_and_an_error_is_left_to_requests():
    class Leases(Computes):
        leased = ()

        async def spec(self, model, until, priority, *, patient):
            self.leased = (*self.leased, (model, priority, patient))
            if model == "away":
                raise Busy("no rows")
            return SPEC

    panel = {"jury": {"a": {"model": "away", "weight": 1.0}, "b": {"model": "m", "weight": 1.0}}}
    for name, leased, spec in (("m", ["m"], SPEC), ("away", ["away"], None), ("jury", ["away", "m"], None)):
        frontend = Leases(panels=panel)
        scorer = RowScorer(frontend, ThreadPool(), model=name, priority=3)
        await scorer.lease()
        assert frontend.leased == tuple((model, 3, True) for model in leased)
        assert scorer.spec == spec


def test_a_single_row_that_does_not_fit_is_not_sent():
    frontend = Computes()
    (why,) = scores(frontend, ["no number"])
    assert isinstance(why, str) and not isinstance(why, Passing)
    assert frontend.asked == []


def test_a_panels_score_is_the_weighted_sum_and_missing_where_a_member_has_none():
    def fails(model, rows):
        error = RowFailed("some failed", errors={1: "no face"}) if model == "b" else None
        return RowsReply({"score": rows}, {"a": 4, "b": 2}[model], SPEC, error)

    found = scores(Computes(fails, PANEL), [1.0, 2.0], model="both")
    assert list(found) == [2.5, "b: no face"] and found.version == 2
    assert found.parts == {"a": [1.0, 2.0], "b": [1.0, "no face"]}


def test_a_member_that_is_away_for_now_leaves_a_reason_that_may_pass_and_another_error_is_raised():
    gone = Computes(lambda model, _: ServerGone("gone") if model == "a" else None, PANEL)
    (why,) = scores(gone, [1.0], model="both")
    assert isinstance(why, Passing) and "a: gone" in why
    with pytest.raises(Refused, match="no such"):
        scores(Computes(lambda model, _: Refused("no such") if model == "a" else None, PANEL), [1.0], model="both")


async def test_a_patient_request_waits_for_a_model_that_is_loading_and_no_longer_than_it_may():
    loading = [Refused("m is loading", Code.NOT_READY)] * 3

    async def hold(name, until, priority):
        if loading:
            raise loading.pop()
        return SimpleNamespace(spec=SPEC)

    frontend = Frontend("ipc:///nowhere", None)
    frontend.lanes.hold_soon = hold
    assert await frontend.spec("m", time.monotonic() + 20, patient=True) is SPEC
    loading[:] = [Refused("m is loading", Code.NOT_READY)] * 1000
    with pytest.raises(Refused, match="is loading"):
        await frontend.spec("m", time.monotonic() + 20)
    with pytest.raises(Timeout, match="is loading"):
        await frontend.spec("m", time.monotonic() - 1, patient=True)
    loading[:] = [Refused("m sleeps", Code.SLEEPING)] * 1000
    with pytest.raises(Refused, match="sleeps"):
        await frontend.compute(RowsRequest("m", lambda *_: None, time.monotonic() + 20, patient=True))


async def test_a_panels_totals_over_open_inference_need_all_of_its_members():
    """They are computed by the same frontend, each on its own lane."""
    frontend = Frontend("ipc:///nowhere", None, panels=PANEL)

    async def hold(name, until, priority=2):
        return SimpleNamespace(spec=SPEC, model=SimpleNamespace(max_batch=8))

    async def computed(request, turn):
        inputs, n, _ = request.read(SPEC, False)
        return RowsReply({"score": inputs["x"]}, 1, SPEC, None)

    frontend.lanes.hold_soon, frontend._computed = hold, computed
    request = RowsRequest(
        "both", lambda spec, partial: ({"x": np.float32([1, math.inf])}, 2, 0), time.monotonic() + 20, names=["x"]
    )
    reply = await frontend.compute(request)
    assert reply.outputs["score"][0] == 2.5 and np.isnan(reply.outputs["score"][1]) and list(reply.failed) == [1]
