"""A panel's scores: the weighted scores of its members; a row without one of them has no total."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest

from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.errors import Code, ModelFailed, Refused, RowFailed, SpecMismatch
from jurybox.server.frontend.lanes import MOMENT, SOON
from jurybox.server.frontend.panels import total
from jurybox.server.frontend.panels import voted as of_members
from jurybox.server.frontend.requests import ReadRows, RowsReply, RowsRequest, Steps
from jurybox.server.gateway.inference import models

MEMBERS = {"sharp": {"weight": 0.25}, "kind": {"weight": 2.0}}


def answer(scores, failed=None):
    error = RowFailed("some failed", errors=failed) if failed else None
    return np.array(scores), RowsReply({}, 3, None, error)


def voted(*answers):
    reply = total(MEMBERS, answers)
    return reply.outputs, reply.failed


def test_the_total_is_the_weighted_sum():
    scores, errors = voted(answer(np.float32([[4], [8]])), answer(np.float32([1, 2])))
    np.testing.assert_array_equal(scores["score"], np.float32([3, 6]))
    assert errors == {}


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_a_row_that_failed_with_a_member_has_neither_its_score_nor_a_total(dtype):
    """Integers have no NaN: the value is 0."""
    scores, errors = voted(answer(np.array([4, 0], dtype), {1: "no face"}), answer(np.float32([1, 2])))
    np.testing.assert_array_equal(scores["sharp"], [4, np.nan])
    np.testing.assert_array_equal(scores["score"], [3, np.nan])
    assert errors == {1: "sharp: no face"}


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_no_number_makes_no_total(wrong):
    scores, errors = voted(answer(np.float32([4, wrong])), answer(np.float32([1, 2])))
    assert np.isnan(scores["score"][1]) and np.isnan(scores["sharp"][1])
    assert errors == {1: f"sharp: the score is {np.float32(wrong)}"}


def test_a_total_that_overflows_is_none():
    scores, errors = voted(answer(np.float32([1])), answer(np.float32([3e38])))
    assert np.isnan(scores["score"][0]) and errors == {0: "the total is inf"}


def test_the_error_of_a_door_that_cannot_say_single_rows_names_them():
    reply = total(MEMBERS, [answer(np.float32([4, np.nan])), answer(np.float32([1, 2]))])
    assert isinstance(reply.error, RowFailed) and "1 of 2 rows have no total" in str(reply.error)
    assert list(reply.error.errors) == [1] and reply.version == 3


def test_members_that_answer_different_numbers_of_rows_are_no_panel():
    with pytest.raises(SpecMismatch, match="different numbers of rows"):
        voted(answer(np.float32([4, 5])), answer(np.float32([1])))


def test_reasons_of_several_members_are_all_told_and_the_rows_are_in_order():
    scores, errors = voted(
        answer(np.float32([4, 0, 0]), {2: "no face"}), answer(np.float32([1, np.nan, 0]), {2: "sad"})
    )
    assert errors == {1: "kind: the score is nan", 2: "sharp: no face; kind: sad"} and list(errors) == [1, 2]
    assert scores["score"][0] == 3 and np.isnan(scores["score"][1:]).all()
    reply = total(MEMBERS, [answer(np.float32([1, 1]), {1: "b", 0: "a"}), answer(np.float32([1, 1]))])
    assert list(reply.failed) == [0, 1] and "the first: sharp: a" in str(reply.error)


def test_the_version_is_the_oldest_of_the_members():
    versions = [RowsReply({}, version) for version in (5, 4)]
    reply = total(MEMBERS, [(np.float32([1]), one) for one in versions])
    assert reply.version == 4 and reply.error is None and reply.spec is None


ONE = TensorSpec("float32", ())
SPECS = {
    "sharpness": ModelSpec("sharpness", {"image": ONE}, {"score": ONE}),
    "kindness": ModelSpec("kindness", {"text": ONE}, {"mark": ONE, "other": ONE}),
}
PANEL = {
    "sharp": {"model": "sharpness", "output": None, "weight": 0.5},
    "kind": {"model": "kindness", "output": "mark", "weight": 2.0},
}


class Members:
    """A frontend that answers 4 and 8 for a member, or with its error; it notes the requests."""

    def __init__(self, **errors):
        self.lanes, self.errors, self.asked, self.held = self, errors, {}, []
        self.both = asyncio.Event()

    async def hold_soon(self, name, until):
        self.held.append((name, until))
        return SimpleNamespace(spec=SPECS[name])

    async def compute(self, request):
        self.asked[request.model] = request
        if len(self.asked) == 2:
            self.both.set()
        await asyncio.wait_for(self.both.wait(), 30)
        if error := self.errors.get(request.model):
            raise error
        rows, n, _ = request.read(SPECS[request.model], False)
        return RowsReply({name: n * next(iter(rows.values())) for name in SPECS[request.model].outputs}, 3)


def asking(seconds=60.0, **more):
    def read(spec, partial):
        assert partial, "it leaves out what the other members take"
        return ReadRows({name: np.float32([2, 4]) for name in spec.inputs}, 2)

    return RowsRequest("panel", read, time.monotonic() + seconds, **{"names": ["image", "text"], **more})


async def test_members_are_asked_at_the_same_time_for_their_part():
    members = Members()
    reply = await of_members(members, asking(priority=1, client=object(), patient=True), PANEL)
    assert reply.outputs["score"].tolist() == [0.5 * 4 + 2 * 4, 0.5 * 8 + 2 * 8]
    assert set(reply.outputs) == {"score", "sharp", "kind"} and reply.version == 3
    assert all((one.client, one.priority, one.patient) == (None, 1, True) for one in members.asked.values())


async def test_the_rows_of_members_are_waited_for_a_moment_and_not_beyond_the_requests_time(monkeypatch):
    monkeypatch.setattr("jurybox.server.frontend.panels.time", SimpleNamespace(monotonic=lambda: 100.0))
    for until, waits in ((200.0, 100.0 + MOMENT), (101.0, 101.0 - SOON)):
        members, request = Members(), asking()
        request.until = until
        await of_members(members, request, PANEL)
        assert members.held == [("sharpness", waits), ("kindness", waits)]


@pytest.mark.parametrize("more", [{"steps": Steps(((1,),), (0,))}, {"version": 0}, {"version": 3}])
async def test_a_panel_has_neither_sequences_nor_versions(more):
    with pytest.raises(Refused, match="'panel' is a panel") as caught:
        await of_members(Members(), asking(**more), PANEL)
    assert caught.value.code == Code.UNSUPPORTED


async def test_an_input_that_no_member_takes_is_refused_before_any_is_asked():
    members = Members()
    with pytest.raises(SpecMismatch, match="input 'sound' is not the panel's; it takes image, text"):
        await of_members(members, asking(names=["image", "sound", "text"]), PANEL)
    assert not members.asked


async def test_the_error_of_a_member_is_raised_when_the_others_have_answered():
    members = Members(sharpness=ModelFailed("it broke"))
    with pytest.raises(ModelFailed, match="it broke"):
        await of_members(members, asking(), PANEL)
    assert set(members.asked) == {"sharpness", "kindness"}


@pytest.mark.parametrize(
    "states", [("ready", "ready"), ("ready", "failed"), ("loading", "ready"), ("failed", "loading")]
)
def test_a_panel_is_as_ready_as_its_members_and_as_old_as_the_oldest(states):
    def part(name, state, version):
        spec = {name: {"dtype": "float32", "shape": []}}
        told = {"state": state, "reason": f"{state}, so", "max_batch": 8, "rows": 64}
        return {"name": name, **told, "inputs": spec, "weights": {"version": version}}

    document = {
        "models": [part("sharp", states[0], 7), part("kind", states[1], 3)],
        "panels": {"both": {"a": {"model": "sharp", "weight": 1.0}, "b": {"model": "kind", "weight": 1.0}}},
    }
    found = models.find(document, "both")
    bad = next((name for name, state in zip(("sharp", "kind"), states, strict=True) if state != "ready"), None)
    expected = {"sharp": states[0], "kind": states[1]}.get(bad, "ready")
    assert (found["name"], found["state"], found["weights"]) == ("both", expected, {"version": 3})
    assert found["reason"] == (f"member {bad!r}: {expected}, so" if bad else "")
    assert sorted(found["inputs"]) == ["kind", "sharp"]
