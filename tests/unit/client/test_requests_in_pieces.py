"""Requests in pieces: what each piece's rows are called, which errors stay, and who waits for rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.client.test_pieces import World, world  # noqa: F401  a fixture
from tests.unit.client.test_sessions import failing_as, versioned  # noqa: F401  a fixture

from jurybox.client import SessionLost


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_an_error_of_the_first_row_of_an_older_version_is_forgotten_with_its_piece(
    world: Callable[..., World],  # noqa: F811
    as_coroutine: bool,
) -> None:
    one = world()
    held = one.leave_free(0, 1, 4)
    module = one._updater.module

    def mend() -> None:
        module.forward = lambda x: torch.full_like(x, module.version)

    one.before_batch[3] = mend  # the first piece once more, by the version of the second
    given = np.array([-1, 1, 1], np.float32)
    came = asyncio.run(one.model.infer_async(given, timeout=20)) if as_coroutine else one.model.infer(given, timeout=20)
    assert came.tolist() == [3, 3, 3]
    del held


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_a_reply_without_rows_tells_no_version(world: Callable[..., World], as_coroutine: bool) -> None:  # noqa: F811
    one, none = world(), np.ones(0, np.float32)
    reply = asyncio.run(one.model.infer_reply_async(none)) if as_coroutine else one.model.infer_reply(none)
    assert reply.version == 0 and reply.outputs.shape == (0,)


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_a_session_that_a_later_piece_has_lost_is_named_by_its_place_in_the_request(
    versioned: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    as_coroutine: bool,
) -> None:
    model, _ = versioned
    with model.sessions(6) as sessions, model.sessions(2) as ahead:
        one = np.ones(1, np.float32)
        sessions.infer(np.ones(6, np.float32))
        tickets = [sessions.submit(one, [5]) for _ in range(6)]
        for ticket in (*tickets[:2], *tickets[3:5]):  # rows 0 and 1, 3 and 4 are free
            ticket.result()
        filling = ahead.submit(np.ones(2, np.float32))
        failing_as(monkeypatch, sessions, SessionLost("gone", sessions=[1]))
        given = np.array([1, 1, -2, -2], np.float32), [3, 2, 1, 0]
        with pytest.raises(SessionLost, match="gone") as lost:
            asyncio.run(sessions.infer_async(*given)) if as_coroutine else sessions.infer(*given)
        assert lost.value.sessions in ([3, 2, 0], [0, 2, 3])
        del filling, tickets


def test_a_coroutine_waits_for_rows_until_another_task_returns_them(
    world: Callable[..., World],  # noqa: F811
) -> None:
    one = world()
    held = one.leave_free()

    async def ask() -> Any:
        asking = asyncio.ensure_future(one.model.infer_async(np.ones(2, np.float32), timeout=30))
        while not one.lane.rows_awaited:
            assert not asking.done()
            await asyncio.sleep(0)
        for run in (held.pop(), held.pop()):
            one.lane.give(run)
        return await asking

    came = asyncio.run(asyncio.wait_for(ask(), 60))
    assert came.shape == (2,)
    held.clear()
