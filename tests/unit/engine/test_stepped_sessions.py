"""Sessions in batches of several forwards: which rows a later forward gets, and what a failed one leaves."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch import nn

from jurybox.client import RowFailed, SessionLost
from jurybox.protocol import TensorSpec
from jurybox.server.inproc import InprocServer
from jurybox.server.models import RowErrors, ServedModel

NUMBER = TensorSpec("float32", ())


class Totals(nn.Module):
    """Adds up what a session was given; notes the rows of each forward, and fails as a test says."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.fails = lambda x: None

    def forward(self, x, total):
        self.seen.append(x.tolist())
        failed = self.fails(x)
        total = total + x
        return RowErrors(failed, (total, total)) if failed else (total, total)


@pytest.fixture
def totals():
    """A module, its served model, and sessions of it."""
    module = Totals()
    model = ServedModel(module, {"x": NUMBER}, {"y": NUMBER}, state={"total": NUMBER})
    with InprocServer({"m": model}, rows=64) as server:
        with server.model("m", rows=16).sessions(6) as sessions:
            sessions.infer(np.ones(6, np.float32))
            module.seen.clear()
            yield module, server.engine.slots[0].served, sessions


def floats(*values):
    return np.array(values, np.float32)


def test_a_padded_forward_of_some_of_the_rows_gets_those_and_no_others(totals):
    """Its rows and the padding are as many as the batch has, but they are not the batch's."""
    module, served, sessions = totals
    served.shapes = (4,)
    tickets = [
        sessions.submit(floats(10, 20), session=[0, 1]),
        sessions.submit(floats(30), session=[0]),  # after the first request's step
        sessions.submit(floats(40), session=[2]),
    ]
    assert [ticket.result().outputs.tolist() for ticket in tickets] == [[11, 21], [41], [41]]
    assert module.seen == [[10, 20, 40, 40], [30, 30, 30, 30]]


def test_a_session_whose_row_fails_in_a_batch_of_several_forwards_makes_no_step(totals):
    module, _, sessions = totals
    module.fails = lambda x: dict.fromkeys(np.flatnonzero(x.numpy() < 0).tolist(), "negative")
    first, second = sessions.submit(floats(10, -20, 30), session=[0, 1, 2]), sessions.submit(floats(5), session=[2])
    with pytest.raises(RowFailed, match="row 1: negative"):
        first.result()
    assert second.result().outputs.tolist() == [36]
    assert len(module.seen) == 2
    assert sessions.infer(floats(1, 1), session=[0, 2]).tolist() == [12, 37]
    with pytest.raises(SessionLost, match="an earlier request of it was lost"):
        sessions.infer(floats(1), session=[1])


@pytest.mark.parametrize(("error", "freed"), [(torch.OutOfMemoryError, 2), (ValueError, 0)])
def test_memory_is_freed_before_requests_that_were_too_many_for_it_are_computed_again(totals, error, freed):
    """They alone are, since the request before them in the batch has made its step."""
    module, served, sessions = totals
    failed, frees = [], []
    served.free_memory = lambda: frees.append(not any(activations() is not None for activations in failed))

    def fails(x):
        if len(x) > 1 and float(x[0]) == 2:
            activations = torch.ones(1000)
            failed.append(weakref.ref(activations))
            raise error("no room")

    module.fails = fails
    tickets = [sessions.submit(floats(1, 1, 1), session=[0, 1, 2])]
    tickets += [sessions.submit(floats(2), session=[row]) for row in range(3)]
    assert [ticket.result().outputs.tolist() for ticket in tickets] == [[2, 2, 2], [4], [4], [4]]
    assert [len(rows) for rows in module.seen] == [3, 3, 1, 2, 1, 1]
    assert len(failed) == 2
    assert frees == [True] * freed, "nothing holds what the failed forwards had made"


def test_a_session_goes_on_in_order_if_its_requests_were_too_many_for_one_forward(totals):
    """The later request waits for the one before it, which is computed again in another turn."""
    module, _, sessions = totals

    def fails(x):
        if len(x) > 1 and float(x[0]) == 2:
            raise ValueError("too many")

    module.fails = fails
    tickets = [sessions.submit(floats(1, 1), session=[0, 1])]
    tickets += [sessions.submit(floats(2), session=[row]) for row in (0, 1)]
    tickets += [sessions.submit(floats(100), session=[1]), sessions.submit(floats(1000), session=[1])]
    assert [ticket.result().outputs.tolist() for ticket in tickets] == [[2, 2], [4], [4], [104], [1104]]


def test_steps_are_computed_beside_a_request_that_only_reads_a_state(totals):
    module, _, sessions = totals
    ticket = sessions.submit(floats(10, 20), session=[0, 1])
    assert sessions.get_state([2, 0])["total"].tolist() == [1, 11]
    assert ticket.result().outputs.tolist() == [11, 21]
    assert sessions.infer(floats(1, 1), session=[1, 2]).tolist() == [22, 2]


@pytest.mark.parametrize("narrow", [torch.float16, torch.int16], ids=str)
def test_a_state_in_a_narrower_dtype_is_kept_in_that_of_the_spec(narrow):
    class Narrow(Totals):
        def forward(self, x, total):
            y, total = super().forward(x, total)
            return y, total.to(narrow)

    model = ServedModel(Narrow(), {"x": NUMBER}, {"y": NUMBER}, state={"total": NUMBER})
    with InprocServer({"m": model}, rows=16) as server, server.model("m", rows=4).sessions(3) as sessions:
        for total in (3, 6, 9):
            assert sessions.infer(floats(3, 3, 3)).tolist() == [total] * 3
        assert sessions.get_state()["total"].tolist() == [9, 9, 9]
        assert sessions.infer(floats(1), session=[1]).tolist() == [10]
