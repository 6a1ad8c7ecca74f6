"""Requests that native code answers: when their tickets are sent, and what becomes of those that get no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.loops import turns

from jurybox.client.transports.shm import ShmTransport
from jurybox.client.transports.transport import NotSent
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.errors import Code, TooManyFiles
from jurybox.server.frontend.returns import BRIEF
from jurybox.server.gateway.inference import fast_path
from jurybox.server.gateway.inference.fast_path import FastPath, FastPaths
from jurybox.server.security.pace import HEAVY, Breaks, WorkPace

SPEC = ModelSpec("m", {"x": TensorSpec("float32", (2,))}, {"y": TensorSpec("float32", (2,))})
ALL = (1 << 63) - 1


class Transport(ShmTransport):
    """The rings of engines, which are only named here."""

    def __init__(self) -> None:
        self.full: Exception | None = None

    def attach(self, engine: int, incarnation: int) -> Any:
        if self.full is not None:
            raise self.full
        return f"rings of {engine}"


class Lane:
    """A leased lane."""

    rows, engines, columns = 8, 1, None

    def __init__(self) -> None:
        self.transport: Any = Transport()
        self.serving = [(0, 1)]

    def take(self, rows: int) -> Any:
        return SimpleNamespace(first=4, rows=rows)

    def able(self) -> list[tuple[int, int]]:
        return self.serving

    def record(self, engine: int) -> str:
        return f"record of {engine}"

    def advance(self) -> int:
        return 100

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        self.answered = arrived


class Native:
    """Stands in for the native lane: its requests, and the answers that a test gives."""

    def __init__(self) -> None:
        self.waiting = self.pending = 0
        self.may_send = True
        self.sent: list[float] = []
        self.at_once: list[bool | None] = []  # what `send` returns; then False
        self.answers: list[tuple[int, int, int, float]] = []
        self.peers: list[Any] = []
        self.untaken: list[int] = []  # until when requests were taken back
        self.given: list[tuple[Any, int, int, bytes]] = []
        self.attached: list[Any] = []
        self.done: list[str] = []

    def attach(self, engines: Sequence[Any], number: int) -> None:
        self.attached.append([(client, incarnation) for client, _, incarnation in engines])

    def detach(self) -> None:
        self.done.append("detached")

    def close(self) -> None:
        self.done.append("closed")

    def send(self, brief: float) -> bool | None:
        self.sent.append(brief)
        self.waiting = 0
        return self.at_once.pop(0) if self.at_once else False

    def receive(self) -> tuple[int, int, int, float] | None:
        return self.answers.pop(0) if self.answers else None

    def answer(self) -> list[Any]:
        return self.peers

    def take_back(self, until: int) -> list[tuple[Any, int, int, bytes]]:
        self.untaken.append(until)
        given, self.given = self.given, []
        return given


class Returns:
    """A rule of which a test sets what it says."""

    alone = keep = block = False
    pause = 0.0

    def __init__(self) -> None:
        self.in_vain = 0
        self.answered_to: list[Any] = []
        self.tickets: list[tuple[int, float]] = []

    def arrived(self, client: Any, seconds: float, waiting: int) -> bool:
        return self.keep

    def answered(self, client: Any) -> None:
        self.answered_to.append(client)

    def took(self, rows: int, seconds: float) -> None:
        self.tickets.append((rows, seconds))

    def wait(self, waiting: int) -> float:
        return self.pause

    def may_block(self, requests: int) -> bool:
        return self.block

    def blocked_in_vain(self) -> None:
        self.in_vain += 1


class Table:
    """The forms of all models."""

    def __init__(self, _path: bytes = b"") -> None:
        self.keys: list[bytes] = []
        self.heads: list[tuple[bytes, int, str]] = []

    def add(self, key: bytes, *_: object) -> None:
        self.keys.append(key)

    def remove(self, key: bytes) -> None:
        self.keys.remove(key)

    def set_heads(self, key: bytes, version: int, heads: str) -> None:
        self.heads.append((key, version, heads))


class Peer:
    """A connection."""

    def __init__(self, *, broken: bool = False) -> None:
        self.alone = f"connection {id(self)}"
        self.broken = broken
        self.flushed = 0
        self.back: list[tuple[int, int, bytes]] = []

    def flush(self) -> None:
        self.flushed += 1
        if self.broken:
            raise OSError("reset")

    def take_back(self, call: int, timeout: int, message: bytes) -> None:
        self.back.append((call, timeout, message))


def form(held: Any, *, used: int = 16, n: int = 1, pinned: bool = False) -> Any:
    return SimpleNamespace(
        held=held, used=used, n=n, pinned=pinned, inputs=["x"], outputs=["y"], heads=lambda version: f"head {version}"
    )


def lane_of(**options: Any) -> Any:
    return SimpleNamespace(spec=SPEC, sessions=None, retired=False, model=SimpleNamespace(max_batch=16), **options)


class World:
    """A fast path over a native lane that the test plays."""

    def __init__(self) -> None:
        self.lane, self.table, self.returns = Lane(), Table(), Returns()
        self.model = SimpleNamespace(name="m", requests=SimpleNamespace(lane=self.lane))
        self.outcomes: list[tuple[str, bool]] = []
        self.path = FastPath(
            lane_of(), cast("Any", self.model), cast("Any", self.table),
            lambda name, answered: self.outcomes.append((name, answered)), WorkPace(),
        )  # fmt: skip
        self.native: Native = cast("Any", self.path._native)
        self.path._returning = cast("Any", self.returns)
        self.path.mend()

    def arrive(self, n: int = 1) -> None:
        """Let so many requests arrive."""
        self.native.waiting += n
        self.native.pending += n
        self.path._arrived(cast("Any", Peer()))

    def answer(self, code: int = 0, version: int = 7, rows: int = 1) -> None:
        self.native.answers.append((code, version, rows, 0.001))
        self.lane.answered()


class PlainFrames:
    """Whether rows are plain; for both kinds of columns."""

    plain = True

    def __init__(self, *_: object) -> None:
        pass

    def __bool__(self) -> bool:
        return self.plain

    def memory(self) -> list[Any]:
        return []


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "PlainFrames", PlainFrames)
    monkeypatch.setattr(fast_path, "LOOK_AFTER", 1000.0)  # however slow this machine is
    monkeypatch.setattr(fast_path, "native", SimpleNamespace(FastLane=lambda *_: Native(), InferForms=Table))


@pytest.fixture
async def world() -> World:
    return World()


async def test_requests_that_arrive_in_one_turn_of_the_loop_share_a_ticket(world: World) -> None:
    for _ in range(3):
        world.arrive()
    assert not world.native.sent
    await turns(2)
    assert world.native.sent == [0.0]
    world.arrive()
    await turns(2)
    assert len(world.native.sent) == 2


async def test_a_lone_clients_request_is_sent_at_once_and_the_loop_may_block_for_it(world: World) -> None:
    world.returns.alone = world.returns.block = True
    world.native.at_once, world.native.answers = [True, False], [(0, 7, 1, 0.001)]
    world.arrive()
    assert world.native.sent == [BRIEF] and world.returns.in_vain == 0
    assert world.returns.tickets == [(1, 0.001)], "its answer is taken at once"
    world.arrive()
    assert world.returns.in_vain == 1
    world.returns.block = False
    world.arrive()
    assert world.native.sent[2:] == [0.0] and world.returns.in_vain == 1


async def test_a_ticket_waits_for_more_requests_as_long_as_the_rule_says_and_a_full_one_does_not(world: World) -> None:
    world.returns.pause = 60.0
    world.arrive()
    await turns(2)
    gathered = world.path._gathered
    assert not world.native.sent and gathered is not None
    world.returns.keep = True
    world.returns.pause = 0.0
    world.arrive()
    await turns(2)
    assert not world.native.sent, "the ticket that waits includes it"
    world.returns.keep = False
    world.arrive()
    await turns(2)
    assert len(world.native.sent) == 1 and world.path._gathered is None
    world.returns.pause = 60.0
    world.arrive(8)
    await turns(2)
    assert len(world.native.sent) == 2


async def test_requests_that_keep_waiting_are_sent_if_no_ticket_waits(world: World) -> None:
    world.returns.keep = True
    world.arrive()
    await turns(2)
    assert len(world.native.sent) == 1


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("hindered", ["no engine is free", "it rests"])
async def test_nothing_is_sent_while_that_is_impossible_and_the_rest_follows_an_answer(
    world: World, hindered: str, alone: bool
) -> None:
    world.returns.alone = alone
    if hindered == "it rests":
        world.path._breaks.resting = True
    else:
        world.native.may_send = False
    world.arrive()
    await turns(2)
    assert not world.native.sent
    world.path._breaks.resting, world.native.may_send = False, True
    world.answer()
    await turns(2)
    assert len(world.native.sent) == 1


async def test_requests_are_answered_otherwise_if_no_ticket_can_be_sent(world: World) -> None:
    peer = Peer()
    world.native.given, world.native.at_once = [(peer, 3, 10**9, b"asked")], [None]
    world.native.untaken.clear()
    world.arrive()
    await turns(3)
    assert world.native.untaken == [ALL] and peer.back == [(3, 10**9, b"asked")]


async def test_an_answer_goes_to_every_connection_though_one_of_them_is_broken(world: World) -> None:
    broken, other = Peer(broken=True), Peer()
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    world.native.peers = [broken, other]
    world.native.untaken.clear()
    world.answer(rows=3)
    assert (broken.flushed, other.flushed) == (1, 1)
    assert [context["message"] for context in told] == ["an answer could not be sent"]
    assert world.returns.answered_to == [broken.alone, other.alone]
    assert world.returns.tickets == [(3, 0.001)] and world.outcomes == [("m", True)]
    assert world.native.untaken == [0], "those of a form without heads of this version"
    world.native.peers = []
    world.answer()
    assert world.outcomes == [("m", True)], "nobody was answered"


async def test_the_heads_of_answers_are_those_of_their_version(world: World) -> None:
    world.path.add(b"a", form(held := lane_of()))
    assert world.table.keys == [b"a"] and not world.table.heads
    world.answer(version=0)
    world.answer(version=0)
    assert world.table.heads == [(b"a", 0, "head 0")]
    world.path.add(b"b", form(held))
    assert world.table.heads[1:] == [(b"b", 0, "head 0")]
    world.answer(version=5)
    assert world.table.heads[2:] == [(b"a", 5, "head 5"), (b"b", 5, "head 5")]


async def test_a_form_is_added_once_and_only_so_many(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "_MOST_FORMS", 2)
    for key in (b"a", b"a", b"b", b"c"):
        world.path.add(key, form(lane_of()))
    assert world.table.keys == [b"a", b"b"]


@pytest.mark.parametrize(("code", "lost"), [(Code.STALE_LEASE, True), (Code.MODEL_FAILED, False)])
async def test_after_a_ticket_that_failed_requests_are_answered_otherwise_for_a_second(
    world: World, monkeypatch: pytest.MonkeyPatch, code: Code, lost: bool
) -> None:
    now = [1000.0]
    monkeypatch.setattr(fast_path, "time", SimpleNamespace(monotonic=lambda: now[0], monotonic_ns=lambda: 5))
    peer = Peer()
    world.native.given = [(peer, 3, 10**9, b"asked")]
    world.native.peers = [peer]
    world.native.untaken.clear()
    world.answer(code)
    await turns(2)
    assert world.path.lost == lost and not peer.flushed and not world.outcomes
    assert world.native.done == ["detached"] and world.native.untaken == [0]
    assert peer.back == [(3, 10**9, b"asked")]
    attached = len(world.native.attached)
    now[0] += 0.9
    world.path.mend()
    assert len(world.native.attached) == attached
    now[0] += 0.2
    world.path.mend()
    assert len(world.native.attached) == attached + 1
    world.path.mend()
    assert len(world.native.attached) == attached + 1


async def test_a_lane_stays_lost(world: World) -> None:
    world.answer(Code.STALE_LEASE)
    world.answer(Code.MODEL_FAILED)
    assert world.path.lost


async def test_engines_are_attached_when_they_serve_the_present_ones_first(world: World) -> None:
    assert world.native.attached == [[("rings of 0", 1)]]
    world.lane.serving = [(1, 9), (0, 1)]
    world.native.untaken.clear()
    world.path.mend()
    assert world.native.attached[1:] == [[("rings of 1", 9), ("rings of 0", 1)]]
    assert world.native.untaken == [0], "requests of an incarnation that has ended"
    world.path.mend()
    assert len(world.native.attached) == 2
    world.lane.serving = [(1, 10)]
    for full in (TooManyFiles("no descriptors are left"), NotSent("no threads are left")):
        world.lane.transport.full = full
        world.path.mend()
        assert len(world.native.attached) == 2
    world.lane.transport.full = None
    world.path.mend()
    assert world.native.attached[2:] == [[("rings of 1", 10), ("rings of 0", 1)]], "0 may still write to its rows"


async def test_requests_that_are_due_are_returned_while_any_are_pending(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_path, "LOOK_AFTER", 0.001)
    monkeypatch.setattr(fast_path, "time", SimpleNamespace(monotonic=lambda: 1000.0, monotonic_ns=lambda: 5))
    peer = Peer()
    world.native.untaken.clear()
    world.native.given = [(peer, 3, 1, b"due")]
    world.lane.serving = [(0, 2)]
    world.arrive()
    for _ in range(3000):
        if world.native.untaken.count(5) >= 2:
            break
        await asyncio.sleep(0.01)
    assert world.native.untaken.count(5) >= 2 and peer.back == [(3, 1, b"due")]
    assert world.native.attached[1:] == [[("rings of 0", 2)]], "engines are looked for, too"
    world.native.pending = 0
    for _ in range(3000):
        if world.path._looking is None:
            break
        await asyncio.sleep(0.01)
    assert world.path._looking is None


async def test_a_closed_path_has_no_forms_and_no_timers_and_returns_every_request(world: World) -> None:
    world.returns.pause = 60.0
    world.path.add(b"a", form(lane_of()))
    world.arrive()
    await turns(2)
    timers = world.path._looking, world.path._gathered
    world.native.untaken.clear()
    world.path.close()
    assert all(timer is not None and timer.cancelled() for timer in timers)
    assert (world.table.keys, world.native.untaken, world.native.done) == ([], [ALL], ["closed"])
    world.path.add(b"a", form(lane_of()))
    assert world.table.keys == [b"a"]


@pytest.mark.parametrize(("rows", "rests"), [(HEAVY // 8, 1), (HEAVY // 8 - 1, 0)])
async def test_after_large_answers_others_come_first(
    world: World, monkeypatch: pytest.MonkeyPatch, rows: int, rests: int
) -> None:
    rested: list[float] = []
    monkeypatch.setattr(Breaks, "after", lambda _, sent, came: rested.append(came - sent))
    world.answer(rows=rows)
    assert len(rested) == rests and all(seconds == pytest.approx(0.001) for seconds in rested)


class Lanes:
    """Where lanes are leased."""

    def __init__(self) -> None:
        self.pace = WorkPace()
        self.leased: list[tuple[str, int]] = []
        self.released: list[Any] = []
        self.last: Callable[[Any], None] = self.released.append

    def lease_another(self, name: str, most: int, leased: Callable[[Any], None]) -> None:
        self.leased.append((name, most))
        self.last = leased

    def release(self, model: Any) -> None:
        self.released.append(model)


def leasable(lane: Lane | None = None) -> Any:
    return SimpleNamespace(name="m", requests=SimpleNamespace(lane=lane or Lane()))


@pytest.fixture
async def paths() -> FastPaths:
    return FastPaths("/path", cast("Any", Lanes()), lambda name, answered: None)


def lanes_of(paths: FastPaths) -> Lanes:
    lanes: Any = paths._lanes
    assert isinstance(lanes, Lanes)
    return lanes


async def test_a_form_is_worth_a_lane_after_sixteen_requests(paths: FastPaths) -> None:
    held = lane_of()
    for wrong in (form(held, used=15), form(held, pinned=True), form(held, n=0)):
        paths.consider(b"a", wrong)
    assert not lanes_of(paths).leased
    paths.consider(b"a", form(held))
    assert lanes_of(paths).leased == [("m", 16)]


@pytest.mark.parametrize(("most", "rows"), [(4, 4), (64, 32)])
async def test_a_lane_has_rows_of_a_batch_but_no_more_than_native_code_uses(
    paths: FastPaths, most: int, rows: int
) -> None:
    held = lane_of()
    held.model.max_batch = most
    paths.consider(b"a", form(held))
    assert lanes_of(paths).leased == [("m", rows)]


async def test_a_model_with_state_gets_no_lane(paths: FastPaths) -> None:
    held = lane_of()
    held.sessions = object()
    paths.consider(b"a", form(held))
    assert not lanes_of(paths).leased


async def test_a_lane_is_leased_again_after_ten_seconds_at_the_earliest(
    paths: FastPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, held = [1000.0], lane_of()
    monkeypatch.setattr(fast_path, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for seconds, leased in ((0.0, 1), (9.9, 1), (0.1, 2), (0.0, 2)):
        now[0] += seconds
        paths.consider(b"a", form(held))
        assert len(lanes_of(paths).leased) == leased


async def test_forms_of_a_leased_lane_are_added_to_it_and_those_of_the_next_one_close_it(paths: FastPaths) -> None:
    held, model = lane_of(), leasable()
    paths.consider(b"a", form(held))
    lanes_of(paths).last(model)
    paths.consider(b"a", form(held))
    paths.consider(b"b", form(held))
    first = paths._open["m"]
    table: Table = cast("Any", paths.forms)
    assert table.keys == [b"a", b"b"] and cast("Native", first._native).attached
    paths.consider(b"a", form(lane_of()))  # its model was loaded again
    assert not table.keys and lanes_of(paths).released == [model] and not paths._open


async def test_a_lane_that_was_revoked_is_given_back(paths: FastPaths) -> None:
    held, model = lane_of(), leasable()
    paths.consider(b"a", form(held))
    lanes_of(paths).last(model)
    paths._open["m"].lost = True
    paths.consider(b"a", form(held))
    assert lanes_of(paths).released == [model] and not paths._open


@pytest.mark.parametrize("why", ["retired", "there is one", "not plain", "another transport"])
async def test_a_lane_that_native_code_cannot_use_is_given_back(
    paths: FastPaths, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    held, model = lane_of(), leasable()
    paths.consider(b"a", form(held))
    if why == "retired":
        held.retired = True
    elif why == "there is one":
        lanes_of(paths).last(leasable())
    elif why == "not plain":
        monkeypatch.setattr(PlainFrames, "plain", False)
    else:
        model.requests.lane.transport = object()
    lanes_of(paths).last(model)
    assert lanes_of(paths).released == [model]
