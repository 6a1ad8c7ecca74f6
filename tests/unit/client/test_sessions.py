"""The client's book of sessions: what it expects of each state, whatever becomes of a request."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jurybox.client import ModelFailed, SessionLost, SpecMismatch
from jurybox.server.inproc import InprocServer
from tests import open_models

N = 4


@pytest.fixture
def sessions():
    with InprocServer({"sum": open_models.running_sum()}, rows=16) as server:
        with server.model("sum", rows=1).sessions(N) as opened:
            yield opened


def broken_off(sessions, monkeypatch, ask):
    """Ask, and press Ctrl-C when the request has been sent."""

    def interrupt(*_):
        raise KeyboardInterrupt

    transport = sessions._requests.lane._transport
    with monkeypatch.context() as patched:
        patched.setattr(transport, "exchange", lambda ticket, _: (transport.send(ticket), interrupt()))
        patched.setattr(transport, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ask()


def test_sessions_of_a_request_with_an_unknown_outcome_are_lost(sessions, monkeypatch):
    ones = np.ones((N, 1), np.float32)
    sessions.infer(ones)
    broken_off(sessions, monkeypatch, lambda: sessions.infer(ones))
    for ask in (
        lambda: sessions.infer(ones),
        lambda: sessions.infer(ones[:1], [2]),
        lambda: sessions.submit(ones),
        sessions.get_state,
        lambda: sessions.infer(ones, reset=[True, False, True, True]),
    ):
        with pytest.raises(SessionLost, match="reset"):
            ask()
    np.testing.assert_array_equal(sessions.infer(ones[:2], [0, 3], reset=[True, True]), [1, 1])
    with pytest.raises(SessionLost) as lost:
        sessions.infer(ones)
    assert lost.value.sessions == [1, 2]
    np.testing.assert_array_equal(sessions.infer(ones, reset=[False, True, True, False]), [2, 1, 1, 2])
    np.testing.assert_array_equal(sessions.infer(ones), [3, 2, 2, 3])


def test_a_request_that_was_not_computed_leaves_every_state_as_it_was(sessions):
    ones = np.ones((N, 1), np.float32)
    sessions.infer(ones)
    for wrong in (ones[:2], ones.astype(np.float64), [[1.0]] * N):
        with pytest.raises(SpecMismatch):
            sessions.infer(wrong)
    with pytest.raises(SpecMismatch, match="reset has shape"):
        sessions.infer(ones, reset=[True])
    with pytest.raises(ModelFailed):
        sessions.infer(-ones, reset=[True, False, False, False])
    np.testing.assert_array_equal(sessions.infer(np.asfortranarray(ones)), [2] * N)


def test_requests_in_order_and_by_number_with_and_without_resets_see_one_book(sessions):
    """At random, beside sums that are kept here; two of a row's three ways are broken off or fail at times."""
    rng, kept = random.Random(3), np.zeros(N, np.float32)
    for _ in range(300):
        ids = list(range(N)) if rng.random() < 0.5 else rng.sample(range(N), rng.randint(1, N))
        given = np.array([[rng.randint(1, 9)] for _ in ids], np.float32)
        reset = [rng.random() < 0.3 for _ in ids] if rng.random() < 0.5 else None
        session = None if ids == list(range(N)) and rng.random() < 0.7 else ids
        expected = np.where(reset or [False] * len(ids), 0, kept[ids]) + given[:, 0]
        if rng.random() < 0.1:
            with pytest.raises(ModelFailed):
                sessions.infer(-given, session, reset)
            continue
        if rng.random() < 0.3:
            came = sessions.submit(given, session, reset).result().outputs
        else:
            came = sessions.infer(given, session, reset)
        np.testing.assert_array_equal(came, expected)
        kept[ids] = expected
        if rng.random() < 0.1:
            np.testing.assert_array_equal(sessions.get_state()["total"], kept)
