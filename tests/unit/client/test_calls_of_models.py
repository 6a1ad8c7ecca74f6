"""What each way to call a model asks for: which version, which rows, and where the model is leased again."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.unit.client.test_model import model, rows, server  # noqa: F401  fixtures
from tests.unit.client.test_pieces import World, world  # noqa: F401  a fixture

from jurybox.client import Busy, Timeout
from jurybox.client.model import Model
from jurybox.protocol.errors import VersionNotHeld

ONE, TWO = np.float32(1), np.ones(2, np.float32)

NEWEST: list[Callable[[Any], Any]] = [
    lambda asked: asked(ONE),
    lambda asked: asked(x=ONE),
    lambda asked: asked.call_reply(ONE).outputs,
    lambda asked: asked.call_reply(x=ONE).outputs,
    lambda asked: asked.row_reply(ONE, 30.0).outputs,
    lambda asked: asked.infer(TWO)[0],
    lambda asked: asked.infer(TWO, output="version")[0],
    lambda asked: asked.infer_reply(TWO).outputs[0],
    lambda asked: asyncio.run(asked.infer_async(TWO))[0],
    lambda asked: asyncio.run(asked.infer_async(TWO, output="version"))[0],
    lambda asked: asked.submit(TWO).result().outputs[0],
]


@pytest.mark.parametrize("ask", NEWEST)
def test_a_call_that_names_no_version_is_computed_by_the_newest(
    world: Callable[..., World],  # noqa: F811
    ask: Callable[[Any], Any],
) -> None:
    one = world()
    for newest in (10, 20):
        one.publish(newest)
        assert ask(one.model) == newest + 1, "each batch is computed by a newer one here"


OF_VERSION: list[Callable[[Any, int], Any]] = [
    lambda asked, version: asked.infer(TWO, version=version),
    lambda asked, version: asked.infer(TWO, version=version, output="version"),
    lambda asked, version: asked.infer_reply(TWO, version=version).outputs,
    lambda asked, version: asyncio.run(asked.infer_async(TWO, version=version)),
    lambda asked, version: asyncio.run(asked.infer_async(TWO, version=version, output="version")),
    lambda asked, version: asyncio.run(asked.infer_reply_async(TWO, version=version)).outputs,
    lambda asked, version: asked.submit(TWO, version=version).result().outputs,
]


@pytest.mark.parametrize("ask", OF_VERSION)
def test_a_call_that_names_a_version_is_computed_by_that_one_or_refused(
    world: Callable[..., World],  # noqa: F811
    ask: Callable[[Any, int], Any],
) -> None:
    one = world()
    one.model.infer(TWO)
    one._updater.publish(30, keep=[20])
    for _ in range(2):
        assert ask(one.model, 20).tolist() == [20, 20]
    with pytest.raises(VersionNotHeld):
        ask(one.model, 19)


@pytest.mark.parametrize(
    "ask",
    [
        lambda asked: asked(rows(1)[0], timeout=0.02),
        lambda asked: asked.call_reply(rows(1)[0], timeout=0.02),
        lambda asked: asked.row_reply(rows(1)[0], 0.02),
    ],
)
def test_one_row_for_which_there_is_no_room_is_refused_and_computed_once_there_is(
    model: Any,  # noqa: F811
    ask: Callable[[Any], Any],
) -> None:
    lane = model.requests.lane
    held = [lane.take(1) for _ in range(6)]
    with pytest.raises(Busy, match="of this lane's 6"):
        ask(model)
    del held
    assert lane.free == 6
    assert model.row_reply(rows(1)[0], 30.0).outputs.reshape(2).tolist() == [2, 2]


@pytest.mark.parametrize(
    "ask",
    [
        lambda asked: asked(rows(1)[0], timeout=0.01),
        lambda asked: asked.call_reply(rows(1)[0], timeout=0.01),
        lambda asked: asked.row_reply(rows(1)[0], 0.01),
        lambda asked: asked.infer(rows(2), timeout=0.01),
        lambda asked: asked.infer(rows(2), timeout=0.01, output="y"),
        lambda asked: asyncio.run(asked.infer_async(rows(2), timeout=0.01)),
        lambda asked: asyncio.run(asked.infer_async(rows(2), timeout=0.01, output="y")),
        lambda asked: asyncio.run(asked.infer_reply_async(rows(2), timeout=0.01)),
        lambda asked: asked.submit(rows(2)).result(0.01),
    ],
)
def test_a_call_of_an_engine_that_does_nothing_ends_with_its_own_time_out(
    model: Any,  # noqa: F811
    ask: Callable[[Any], Any],
) -> None:
    model.requests.lane._transport._turn = lambda: False
    with pytest.raises(Timeout, match="'m' did not answer in time"):
        ask(model)


def test_a_model_is_shown_with_its_tensors_its_rows_and_where_it_is(model: Any, server: Any) -> None:  # noqa: F811
    assert repr(model) == ("<Model 'm' (x: float32[2]) -> (y: float32[2]), 6 rows, 0 in flight, up to 4 rows a batch>")
    ticket = model.submit(rows(2))
    assert "6 rows, 1 in flight" in repr(model)
    ticket.result()
    there = Model("m", lambda n, _: server._lease("m", n, 2), 3, 60.0, lambda _: None, None, "ipc://there")
    assert repr(there).endswith("3 rows, 0 in flight, up to 4 rows a batch, ipc://there>")


class Connection:
    """A connection that can be sent to another process; it notes the models that it is asked for."""

    asked: list[tuple[Any, ...]] = []

    def model(self, name: str, **how: Any) -> str:
        self.asked.append((name, how))
        return "a model"


def test_a_model_that_is_unpickled_is_leased_there_as_it_was_here(server: Any) -> None:  # noqa: F811
    connection = Connection()
    again = (connection.model, 9.0, False, 3)
    here = Model("m", lambda n, _: server._lease("m", n, 2), 5, 60.0, lambda _: None, again)
    Connection.asked.clear()
    assert pickle.loads(pickle.dumps(here)) == "a model"
    assert Connection.asked == [("m", {"rows": 5, "timeout": 9.0, "wait": False, "priority": 3})]


def test_a_model_of_no_connection_cannot_be_pickled(model: Any) -> None:  # noqa: F811
    with pytest.raises((TypeError, pickle.PicklingError)):
        pickle.dumps(model)
