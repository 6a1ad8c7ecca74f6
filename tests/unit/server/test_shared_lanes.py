"""How many rows the gateway leases for a model, when it leases others, and when it gives them back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tests.loops import turns

from jurybox.client import Busy, Error, ModelFailed, ModelNotFound, Refused, RowFailed, ServerGone, Timeout
from jurybox.client.ticket import Reply
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.errors import Code
from jurybox.protocol.scoreboard import NORMAL
from jurybox.server.frontend import lanes as module
from jurybox.server.frontend.lanes import MOMENT, SOON, ModelRows, SharedLane
from jurybox.server.frontend.returns import Returns

SPEC = ModelSpec("m", {"x": TensorSpec("float32", (2,))}, {"y": TensorSpec("float32", (2,))})
KEEPING = ModelSpec("m", SPEC.inputs, SPEC.outputs, {"n": TensorSpec("float32")})
ROW = {"x": np.ones((1, 2), np.float32)}
HIGH = 1


class Model:
    """A leased lane; its answers are double their rows."""

    def __init__(self, spec: ModelSpec = SPEC, max_batch: int = 8, engines: int = 1) -> None:
        self.name, self.spec, self.max_batch = "m", spec, max_batch
        self.requests = SimpleNamespace(lane=SimpleNamespace(engines=engines))
        self.closed = 0
        self.asked: list[tuple[int, float, int | None]] = []
        self.errors: list[Error] = []
        self.go = asyncio.Event()
        self.go.set()

    async def infer_reply_async(self, inputs: Any, *, timeout: float, version: int | None) -> Reply:
        n = len(inputs["x"])
        self.asked.append((n, timeout, version))
        await self.go.wait()
        if self.errors:
            raise self.errors.pop(0)
        return Reply(inputs["x"] * 2, 10 - len(self.asked))

    def room(self) -> int:
        return 8

    def look(self) -> None:
        pass

    def close(self) -> None:
        self.closed += 1

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Server:
    """A connection to a server with one model, of which so many adjacent rows are free."""

    def __init__(self) -> None:
        self.state, self.reason, self.spec = "ready", "", SPEC
        self.max_batch, self.arena_rows, self.free, self.number = 8, 100, 100, 2
        self.asked: list[dict[str, Any]] = []
        self.models: list[Model] = []
        self.error: Error | None = None
        self.closed = False

    def describe(self, name: str) -> Any:
        if self.error is not None:
            raise self.error
        return SimpleNamespace(
            state=self.state, reason=self.reason, spec=self.spec, max_batch=self.max_batch, arena_rows=self.arena_rows
        )

    def engines(self, name: str) -> int:
        return self.number

    def model(self, name: str, **options: Any) -> Model:
        self.asked.append(options)
        if options["rows"] > self.free:
            raise Busy(f"{self.free} rows are free")
        self.models.append(Model(self.spec, self.max_batch, self.number))
        return self.models[-1]

    def close(self) -> None:
        self.closed = True

    @property
    def rows(self) -> list[int]:
        """The numbers of rows that were asked for."""
        return [options["rows"] for options in self.asked]


class Sessions:
    """The sessions of a model with state, whose numbers and beginnings it notes."""

    version = 7

    def __init__(self, requests: Any, n: int) -> None:
        self.asked: list[tuple[list[int], list[bool]]] = []

    async def infer_async(self, inputs: Any, session: list[int], reset: list[bool], **_: object) -> Any:
        self.asked.append((session, reset))
        return inputs["x"]


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def lanes(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ModelRows]:
    monkeypatch.setattr(module, "Sessions", Sessions)
    made = ModelRows("ipc:///nowhere")
    made._server = cast("Any", server)
    yield made
    made.close()


def of(held: SharedLane) -> Model:
    model: Any = held.model
    assert isinstance(model, Model)
    return model


async def released(lanes: ModelRows) -> None:
    """Wait until the thread has done what it was given."""
    await asyncio.wait_for(asyncio.wrap_future(lanes._thread.submit(lambda: None)), 30)


@pytest.mark.parametrize(
    ("spec", "arena", "free", "asked"),
    [
        (SPEC, 100, 100, [24]),  # a batch for each of two engines, and one that is written
        (SPEC, 20, 100, [10]),
        (SPEC, 1, 100, [1]),
        (SPEC, 100, 6, [24, 6]),
        (SPEC, 100, 1, [24, 6, 1]),
        (KEEPING, 5000, 5000, [1024]),
        (KEEPING, 100, 100, [50]),
        (KEEPING, 100, 12, [50, 12]),
    ],
)
async def test_a_lane_has_as_many_rows_as_engines_compute_if_so_many_are_free(
    server: Server, lanes: ModelRows, spec: ModelSpec, arena: int, free: int, asked: list[int]
) -> None:
    server.spec, server.arena_rows, server.free = spec, arena, free
    held = await lanes.hold("m", priority=HIGH)
    assert (server.rows, held.rows, held.key) == (asked, asked[-1], ("m", HIGH))
    assert all((options["wait"], options["priority"]) == (False, HIGH) for options in server.asked)
    assert held.makeshift == (bool(spec.state) and len(asked) > 1), "every sequence needs its own row"
    assert await lanes.hold("m", priority=HIGH) is held or held.makeshift


async def test_no_lane_is_leased_if_no_row_is_free(server: Server, lanes: ModelRows) -> None:
    server.free = 0
    with pytest.raises(Busy):
        await lanes.hold("m")
    assert server.rows == [24, 6, 1]


async def test_a_probe_leases_one_row_and_a_request_then_a_full_lane(server: Server, lanes: ModelRows) -> None:
    probed = await lanes.hold("m", trying=True)
    assert (probed.rows, probed.makeshift, lanes.held("m")) == (1, True, None)
    assert await lanes.hold("m", trying=True) is probed
    held = await lanes.hold("m")
    assert (held.rows, held.makeshift, lanes.held("m")) == (24, False, held)
    assert await lanes.hold("m", trying=True) is held
    await released(lanes)
    assert probed.retired and of(probed).closed == 1 and not of(held).closed


async def test_each_priority_has_its_lane_and_known_forms_use_the_normal_one(server: Server, lanes: ModelRows) -> None:
    high, normal = await lanes.hold("m", priority=HIGH), await lanes.hold("m")
    assert high is not normal and lanes.held("m") is normal
    assert [options["priority"] for options in server.asked] == [HIGH, NORMAL]


async def test_a_lane_of_few_rows_is_kept_for_a_second_if_there_are_no_more(server: Server, lanes: ModelRows) -> None:
    server.free = 1
    probed = await lanes.hold("m", trying=True)
    before = time.monotonic()
    assert await lanes.hold("m") is probed and probed.makeshift
    assert before + 1.0 <= probed.largest_until <= time.monotonic() + 1.0
    asked = len(server.asked)
    probed.largest_until += 1000  # however slow this machine is
    assert await lanes.hold("m") is probed and len(server.asked) == asked
    probed.largest_until = 0.0
    server.free = 100
    assert (await lanes.hold("m")).rows == 24


async def test_a_full_lane_of_a_single_row_is_no_makeshift(server: Server, lanes: ModelRows) -> None:
    server.arena_rows = 2
    probed = await lanes.hold("m", trying=True)
    assert await lanes.hold("m") is probed and not probed.makeshift and lanes.held("m") is probed
    assert server.rows == [1]


async def test_a_lane_that_was_given_up_meanwhile_is_not_kept(server: Server, lanes: ModelRows) -> None:
    server.free = 1
    probed = await lanes.hold("m", trying=True)
    probed.retired = True
    held = await lanes.hold("m")
    assert held is not probed and held.rows == 1


async def test_a_new_sequence_waits_a_moment_for_a_larger_lane(
    server: Server, lanes: ModelRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.spec, server.free = KEEPING, 12
    held = await lanes.hold("m")
    held._leased += 1000  # however slow this machine is
    assert (held.makeshift, held.may_be_exchanged, held.has_sequence) == (True, True, False)
    before = time.monotonic()
    assert await lanes.hold("m") is held
    assert before + SOON <= held.largest_until <= time.monotonic() + SOON
    held.largest_until = 0.0
    held.free.pop()
    assert (held.has_sequence, held.may_be_exchanged) == (True, False)
    asked = len(server.asked)
    assert await lanes.hold("m") is held and len(server.asked) == asked, "its sequences stay"
    held.free.append(1)
    held._leased -= 1000 + MOMENT
    assert (held.has_sequence, held.may_be_exchanged) == (False, False)


@pytest.mark.parametrize(
    ("rows", "free"), [(4, [3, 2, 1]), (2, [1]), (1, [0])], ids=["four", "two", "one, which probes use, too"]
)
async def test_the_rows_of_sequences_are_all_but_that_of_probes(
    server: Server, lanes: ModelRows, rows: int, free: list[int]
) -> None:
    server.spec, server.arena_rows = KEEPING, 2 * rows
    held = await lanes.hold("m")
    assert held.free == free and not held.has_sequence
    held.free.pop()
    assert held.has_sequence


@pytest.mark.parametrize(
    ("state", "reason", "error", "code", "says"),
    [
        ("quarantined", "it kills engines", ModelFailed, Code.MODEL_FAILED, "^it kills engines$"),
        ("failed", "no file", ModelFailed, Code.MODEL_FAILED, "could not be loaded: no file"),
        ("sleeping", "", Refused, Code.SLEEPING, "sleep"),
        ("loading", "", Refused, Code.NOT_READY, "'m' is loading: ask again"),
        ("unloading", "", Refused, Code.NOT_READY, "'m' is unloading: ask again"),
    ],
)
async def test_a_model_that_is_not_ready_is_refused_with_its_reason(
    server: Server, lanes: ModelRows, state: str, reason: str, error: type[Error], code: Code, says: str
) -> None:
    server.state, server.reason = state, reason
    with pytest.raises(error, match=says) as caught:
        await lanes.hold("m")
    assert caught.value.code == code and not server.asked


async def test_a_server_that_does_not_answer_in_time_is_not_ready_and_one_that_is_gone_is_gone(
    server: Server, lanes: ModelRows
) -> None:
    server.error = Timeout("the server did not answer")
    with pytest.raises(Refused, match="did not answer") as caught:
        await lanes.hold("m")
    assert caught.value.code == Code.NOT_READY
    server.error = ServerGone("gone")
    with pytest.raises(ServerGone):
        await lanes.hold("m")


async def test_a_name_that_no_model_can_have_is_refused_here(server: Server, lanes: ModelRows) -> None:
    with pytest.raises(ModelNotFound, match="at most"):
        await lanes.hold("m" * 1000)
    assert not server.asked


async def test_callers_share_a_lease_and_one_that_gives_up_leaves_it_to_the_others(
    server: Server, lanes: ModelRows
) -> None:
    first, second = (asyncio.create_task(lanes.hold("m")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await asyncio.wait_for(second, 30)).rows == 24 and server.rows == [24]


async def test_a_lane_that_was_given_up_takes_no_caller_and_is_closed_after_the_last(
    server: Server, lanes: ModelRows
) -> None:
    held = await lanes.hold("m")
    with held:
        lanes.retire(held)
        await released(lanes)
        assert not of(held).closed
        with pytest.raises(Refused, match="given up just now") as caught, held:
            pass
        assert caught.value.code == Code.STALE_LEASE
    await released(lanes)
    assert of(held).closed == 1
    lanes.retire(held)
    lanes.let_go(held)
    await released(lanes)
    assert of(held).closed == 1 and lanes.held("m") is None
    assert await lanes.hold("m") is not held


async def test_requests_of_a_lane_that_is_given_up_are_told_to_ask_again_and_it_closes_after_them(
    server: Server, lanes: ModelRows
) -> None:
    held = await lanes.hold("m")
    model = of(held)
    model.go.clear()
    asking = asyncio.create_task(lanes.ask(held, ROW, 1, 60.0, 0))
    await turns()
    lanes.retire(held)
    with pytest.raises(Refused, match="taken back: ask again") as caught:
        await asyncio.wait_for(asking, 30)
    assert caught.value.code == Code.STALE_LEASE
    await released(lanes)
    assert [model.closed] == [0], "its ticket is in flight"
    model.go.set()
    await turns()
    await released(lanes)
    assert model.closed == 1


async def test_a_request_that_is_not_answered_in_time_is_counted_for_its_model(
    server: Server, lanes: ModelRows
) -> None:
    held = await lanes.hold("m")
    of(held).go.clear()
    with pytest.raises(Timeout):
        await lanes.ask(held, ROW, 1, 0.01, 0)
    assert lanes.timeouts == {"m": 1}
    of(held).go.set()


async def test_a_batch_is_one_ticket_and_more_rows_are_sent_in_pieces(server: Server, lanes: ModelRows) -> None:
    held = await lanes.hold("m")
    model = of(held)
    rows = {"x": np.arange(40, dtype=np.float32).reshape(20, 2)}
    answer, version = await lanes.ask(held, {"x": rows["x"][:8]}, 8, 60.0, 5)
    assert [(n, asked) for n, _, asked in model.asked] == [(8, 5)] and version == 9
    model.asked.clear()
    answer, version = await lanes.ask(held, rows, 20, 60.0, 0)
    np.testing.assert_array_equal(answer["y"], rows["x"] * 2)
    assert [n for n, _, _ in model.asked] == [8, 8, 4] and version == 7, "the oldest of all pieces"
    assert all(0 < seconds <= 60 for _, seconds, _ in model.asked)


async def test_a_batch_is_one_request_also_on_a_lane_of_fewer_rows(server: Server, lanes: ModelRows) -> None:
    """The client divides it, and has it computed by one version."""
    held = await lanes.hold("m", trying=True)
    for n, asked in ((8, [8]), (9, [8] + [1] * 9)):
        await lanes.ask(held, {"x": np.ones((n, 2), np.float32)}, n, 60.0, 0)
        assert [rows for rows, _, _ in of(held).asked] == asked


async def test_rows_that_fail_in_pieces_are_named_by_their_places_beside_the_others_outputs(
    server: Server, lanes: ModelRows
) -> None:
    server.number = 1
    held = await lanes.hold("m")
    outputs = np.full((8, 2), 5, np.float32)
    for at in (6, 1):
        of(held).errors.append(RowFailed("1 row failed", None, {at: f"no {at}"}, outputs, 3))
    rows = {"x": np.ones((17, 2), np.float32)}
    with pytest.raises(RowFailed) as failed:
        await lanes.ask(held, rows, 17, 60.0, 0)
    assert list(failed.value.errors.items()) == [(6, "no 6"), (9, "no 1")] and failed.value.version == 3
    assert failed.value.outputs[:16].tolist() == [[5, 5]] * 16 and failed.value.outputs[16:].tolist() == [[2, 2]]


async def test_rows_that_fail_are_named_in_their_order_whichever_piece_ends_first(
    server: Server, lanes: ModelRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, later = await lanes.hold("m"), asyncio.Event()

    async def failing(inputs: Any, *, timeout: float, version: int | None) -> Reply:
        if inputs["x"][0, 0] == 0:
            await later.wait()
        later.set()
        raise RowFailed("1 row failed", None, {0: "no"}, np.zeros((8, 2), np.float32), 3)

    monkeypatch.setattr(of(held), "infer_reply_async", failing)
    with pytest.raises(RowFailed) as failed:
        await lanes.ask(held, {"x": np.arange(32, dtype=np.float32).reshape(16, 2)}, 16, 60.0, 0)
    assert list(failed.value.errors) == [0, 8]


async def test_an_error_of_one_piece_ends_the_others(server: Server, lanes: ModelRows) -> None:
    held = await lanes.hold("m")
    of(held).errors.append(ModelFailed("no"))
    with pytest.raises(ModelFailed):
        await lanes.ask(held, {"x": np.ones((80, 2), np.float32)}, 80, 60.0, 0)
    await turns()
    asked = len(of(held).asked)
    await turns()
    assert len(of(held).asked) == asked < 10 and not held.in_use


async def test_a_probe_of_a_model_is_one_row_of_zeros_and_its_failure_an_answer(
    server: Server, lanes: ModelRows
) -> None:
    held = await lanes.hold("m", trying=True)
    of(held).errors.append(RowFailed("1 row failed", None, {0: "zeros"}, np.zeros((1, 2), np.float32), 3))
    await lanes.probe(held, 60.0, 4)
    assert [(n, version) for n, _, version in of(held).asked] == [(1, 4)]
    of(held).errors.append(ModelFailed("no"))
    with pytest.raises(ModelFailed):
        await lanes.probe(held, 60.0, 4)


async def test_a_probe_of_sessions_uses_their_own_or_one_that_no_sequence_has(server: Server, lanes: ModelRows) -> None:
    server.spec = KEEPING
    held = await lanes.hold("m")
    sessions: Any = held.sessions
    await lanes.probe(held, 60.0, 0)
    assert sessions.asked == [([0], [True])]
    single = await lanes.hold("m", trying=True, priority=HIGH)
    sessions = single.sessions
    await lanes.probe(single, 60.0, 0)
    assert sessions.asked == [([0], [True])] and single.free == [0]
    single.free.clear()
    await lanes.probe(single, 60.0, 0)
    assert len(sessions.asked) == 1, "its requests show whether the model answers"


@pytest.mark.parametrize(
    ("spec", "arena", "asked", "leased"),
    [(SPEC, 100, 40, 40), (SPEC, 60, 40, 30), (SPEC, 1, 40, 1), (KEEPING, 60, 40, 40)],
)
async def test_a_door_leases_a_row_for_each_client_but_half_of_an_arena_that_they_share(
    server: Server, lanes: ModelRows, spec: ModelSpec, arena: int, asked: int, leased: int
) -> None:
    server.spec, server.arena_rows = spec, arena
    held = await lanes.reserve("m", asked, 9.0, lambda _: Returns(), HIGH)
    assert held.rows == leased and not held.makeshift and lanes.held("m") is None
    assert [(one["rows"], one["timeout"], one["priority"]) for one in server.asked] == [
        (1, 9.0, HIGH),
        (leased, 9.0, HIGH),
    ]
    assert [one.closed for one in server.models] == [1, 0]
    lanes.retire(held)
    await released(lanes)
    assert of(held).closed == 1 and not lanes._reserved


@pytest.mark.parametrize("way", ["hold", "reserve"])
async def test_requests_of_every_lane_are_failed_or_doubted(
    server: Server, lanes: ModelRows, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr("jurybox.server.frontend.coalescer._DOUBT", 0.01)
    for doubted in (False, True):
        held = await (lanes.hold("m") if way == "hold" else lanes.reserve("m", 4, 9.0, lambda _: Returns()))
        of(held).go.clear()
        asking = asyncio.create_task(lanes.ask(held, ROW, 1, 60.0, 0))
        await turns()
        if doubted:
            lanes.doubt()
        else:
            lanes.give_up(Busy("over"))
        with pytest.raises(Refused if doubted else Busy):
            await asyncio.wait_for(asking, 30)
        of(held).go.set()


@pytest.mark.parametrize(
    ("arena", "error", "rows"),
    [(100, None, [12]), (400, None, [48]), (80, None, [10]), (24, None, [3]), (23, None, []), (100, Busy("full"), [])],
)
async def test_another_lane_has_an_eighth_of_the_arena_at_most_or_there_is_none(
    server: Server, lanes: ModelRows, arena: int, error: Error | None, rows: list[int]
) -> None:
    server.arena_rows, server.error = arena, error
    got: list[Any] = []
    lanes.lease_another("m", 16, got.append)
    await released(lanes)
    await turns()
    assert server.rows == rows and got == server.models and all(not one["wait"] for one in server.asked)
    for model in got:
        lanes.release(model)
        await released(lanes)
        assert model.closed == 1


async def test_an_action_of_the_connection_runs_in_a_thread(
    server: Server, lanes: ModelRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def action(connection: Any) -> bool:
        assert connection is server
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return True

    assert await lanes.call(action)


async def test_the_server_is_connected_to_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[Any, ...]] = []

    def connect(address: str, **options: Any) -> Server:
        opened.append((address, options))
        return server

    monkeypatch.setattr(module, "connect", connect)
    lanes = ModelRows("ipc:///somewhere")
    await lanes.hold("m")
    await lanes.hold("m", priority=HIGH)
    assert opened == [("ipc:///somewhere", {"transport": "shm", "timeout": 2.0})]
    lanes.close()
    await asyncio.to_thread(lanes._thread.shutdown)
    assert server.closed
