"""Requests that need several tickets: one weights version if a batch could hold them, and one time-out for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.serving import wait_until
from tests.unit.client.test_sessions import Updater
from torch import nn

from jurybox.client import Busy, RowFailed, Timeout
from jurybox.protocol import TensorSpec
from jurybox.protocol.errors import VersionNotHeld
from jurybox.server.inproc import InprocServer
from jurybox.server.models import RowErrors, ServedModel

NUMBER = TensorSpec("float32")


class Versioned(nn.Module):
    """The weights version that computes each row. Negative rows fail."""

    def __init__(self):
        super().__init__()
        self.version = 1

    def forward(self, x):
        outputs = torch.full_like(x, self.version)
        wrong = {row: f"{value} by version {self.version}" for row, value in enumerate(x.tolist()) if value < 0}
        return RowErrors(wrong, outputs) if wrong else outputs


class World:
    """A model of which each batch is computed by a newer version, unless it asks for one.

    The engine's batches have at most two rows; the client believes that they have up to four.
    """

    def __init__(self, server, module, rows):
        self.model = server.model("m", rows=rows)
        self.lane = self.model.requests.usable()
        self.batches, self.before_batch, self.keeps = 0, {}, True
        self._updater = server.engine.slots[0].served.weights_updater = Updater(module)
        self._use, self._updater.use = self._updater.use, self.use
        server.engine.slots[0].queue.max_batch = 2

    def use(self, version):
        self.batches += 1
        self.before_batch.get(self.batches, lambda: None)()
        if not version:
            new = self._updater.version + 1
            self._updater.publish(new, keep=[self._updater.version] if self.keeps else ())
        self._use(version)

    def publish(self, version):
        self._updater.publish(version)

    def leave_free(self, *rows: int) -> list[Any]:
        """Hold all rows of the lane but these."""
        runs = [self.lane.take(1) for _ in range(self.lane.rows)]
        return [run for at, run in enumerate(runs) if at not in rows]


@pytest.fixture
def world():
    with InprocServer(
        {"m": ServedModel(module := Versioned(), {"x": NUMBER}, {"version": NUMBER})}, max_batch=4
    ) as one:
        yield lambda rows=8: World(one, module, rows)


def test_a_request_of_several_batches_tells_the_oldest_version_that_computed_it(world):
    reply = world(rows=2).model.infer_reply(np.ones(6, np.float32))
    assert reply.outputs.tolist() == [2, 2, 3, 3, 4, 4] and reply.version == 2


def test_a_piece_that_is_sent_again_may_be_divided_otherwise(world):
    one = world()
    held = one.leave_free(0, 1, 4)
    one.before_batch[2] = lambda: held.append(one.lane.take(1))  # the first piece is answered, and its rows are free
    reply = one.model.infer_reply(np.ones(3, np.float32), timeout=20)
    assert reply.outputs.tolist() == [3, 3, 3] and reply.version == 3 and one.batches == 3


def test_the_errors_of_a_piece_that_is_sent_again_are_those_of_the_version_that_answers(world):
    one = world()
    held = one.leave_free(0, 1, 4)
    with pytest.raises(RowFailed) as failed:
        one.model.infer_reply(np.array([1, -1, -2], np.float32), timeout=20)
    assert failed.value.errors == {1: "-1.0 by version 3", 2: "-2.0 by version 3"} and failed.value.version == 3
    assert failed.value.outputs[0] == 3
    del held


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_a_request_begins_again_if_the_version_of_its_newest_piece_is_no_longer_held(world, as_coroutine):
    one = world()
    held = one.leave_free(0, 1, 4)

    def forget():
        one.before_batch.clear()
        one.publish(10)

    one.before_batch[3] = forget  # the first piece, which asks for the version of the second
    given = np.ones(3, np.float32)
    came = asyncio.run(one.model.infer_async(given, timeout=20)) if as_coroutine else one.model.infer(given, timeout=20)
    assert len(set(came.tolist())) == 1 and came[0] > 10
    del held


def test_a_coroutine_of_several_batches_ends_with_its_own_time_out(world):
    one = world()
    one.lane._transport._turn = lambda: False  # the engine does nothing

    async def ask():
        with pytest.raises(Timeout, match="did not answer in time"):
            await one.model.infer_async(np.ones(6, np.float32), timeout=0.05)

    asyncio.run(asyncio.wait_for(ask(), 20))


def test_a_cancelled_ticket_is_not_sent_again_after_its_engine_has_died(world):
    one = world()
    one.lane._transport._turn = lambda: False
    tickets = [one.model.submit(np.ones(2, np.float32)) for _ in range(2)]
    assert tickets[0].cancel() and one.lane.free == 4, "the engine may still write to its rows"
    one.lane._incarnations[0] += 1
    one.lane.look_after()
    assert one.lane.free == 6 and len(one.lane.in_flight) == 1


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_rows_that_fail_in_a_later_piece_are_named_by_their_place_in_the_request(
    world: Callable[..., World], as_coroutine: bool
) -> None:
    one = world()
    held = one.leave_free(0, 1, 4)
    given = np.array([1, 1, -2], np.float32)
    with pytest.raises(RowFailed) as failed:
        asyncio.run(one.model.infer_async(given, timeout=20)) if as_coroutine else one.model.infer(given, timeout=20)
    assert failed.value.errors == {2: "-2.0 by version 3"}
    assert failed.value.outputs[:2].tolist() == [3, 3]
    del held


def test_a_full_batch_in_pieces_is_computed_by_one_version(world: Callable[..., World]) -> None:
    one = world()
    held = one.leave_free(0, 1, 4, 5)
    reply = one.model.infer_reply(np.ones(4, np.float32), timeout=20)
    assert reply.outputs.tolist() == [3] * 4 and reply.version == 3
    del held


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_a_request_in_pieces_for_a_version_that_is_not_held_is_refused(
    world: Callable[..., World], as_coroutine: bool
) -> None:
    one = world()
    held = one.leave_free(0, 1, 4)
    given = np.ones(3, np.float32)
    with pytest.raises(VersionNotHeld):
        if as_coroutine:
            asyncio.run(one.model.infer_async(given, timeout=20, version=99))
        else:
            one.model.infer(given, timeout=20, version=99)
    del held


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_a_request_of_no_rows_is_answered_without_the_engine(world: Callable[..., World], as_coroutine: bool) -> None:
    one, given = world(), np.ones(0, np.float32)
    came = asyncio.run(one.model.infer_async(given)) if as_coroutine else one.model.infer(given)
    assert came.shape == (0,) and one.batches == 0


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_a_request_for_which_no_row_can_become_free_is_refused(world: Callable[..., World], as_coroutine: bool) -> None:
    one, given = world(), np.ones(2, np.float32)
    held = one.leave_free()
    with pytest.raises(Busy, match="rows"):
        asyncio.run(one.model.infer_async(given, timeout=0.05)) if as_coroutine else one.model.infer(given, timeout=20)
    del held
    assert one.model.infer(given).tolist() == [2, 2]


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_rows_of_a_request_that_is_late_return_while_its_error_is_kept(
    world: Callable[..., World], as_coroutine: bool
) -> None:
    one, given = world(), np.ones(6, np.float32)
    turn = one.lane._transport._turn
    one.lane._transport._turn = lambda: False  # the engine does nothing
    with pytest.raises(Timeout) as late:
        asyncio.run(one.model.infer_async(given, timeout=0.05)) if as_coroutine else one.model.infer(
            given, timeout=0.05
        )
    assert one.lane.free == 2, "the engine may still write to them"
    one.lane._transport._turn = turn
    wait_until(lambda: one.lane.receive(0.1) is None and not one.lane.in_flight, 30, "the answers")
    assert one.lane.free == 8 and late.value is not None
