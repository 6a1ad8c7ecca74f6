"""How long a client on the server's host waits: for engines that pause, for other pauses, for a weights channel."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.clocks import Clock, given
from tests.unit.client.test_local_link import Board, binding, board, link  # noqa: F401  fixtures

from jurybox.client import local_link
from jurybox.client.local_link import LocalLink
from jurybox.protocol.control_pb2 import BindRequest, ControlReply, ModelMessage
from jurybox.protocol.errors import Busy, Refused, Timeout
from jurybox.protocol.scoreboard import PAUSE_LOCK
from jurybox.protocol.segment import is_locked, try_lock, unlock


class Eventful(Clock):
    """Time in which something happens at a sleep."""

    def __init__(self) -> None:
        super().__init__(time.monotonic())
        self.happens: dict[int, Callable[[], object]] = {}

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.happens.get(len(self.slept), lambda: None)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Eventful:
    made = Eventful()
    given(made, monkeypatch, local_link)
    return made


@pytest.fixture
def timed(link: Any, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: F811
    """The link; `given` has the seconds of each of its calls."""
    link.given, call = [], link._call

    def noted(timeout: float, *rest: Any, **request: Any) -> ControlReply:
        link.given.append(timeout)
        reply: ControlReply = call(timeout, *rest, **request)
        return reply

    link._call = noted
    return link


def test_a_pause_waits_for_engines_that_are_in_a_batch(timed: Any, board: Board, clock: Eventful) -> None:  # noqa: F811
    board.engines["paused"] = 1, 0

    def pause() -> None:
        board.engines["paused"] = 1

    clock.happens[3] = pause
    timed.pause(2.0)()
    assert clock.slept == [0.0005] * 3 and timed.given[0] == pytest.approx(2.0)
    board.engines["paused"] = 1, 0
    with pytest.raises(Timeout, match="engine 1 has been in a batch for 0.1 s"):
        timed.pause(0.1)
    assert 0.0999 < sum(clock.slept[3:]) < 0.102 and not is_locked(board.other, PAUSE_LOCK)


def test_a_pause_begins_when_another_process_ends_its_own(timed: Any, board: Board, clock: Eventful) -> None:  # noqa: F811
    assert try_lock(board.other, PAUSE_LOCK)
    clock.happens[4] = lambda: unlock(board.other, PAUSE_LOCK)
    go_on = timed.pause(2.0)
    assert clock.slept == [0.0005] * 4 and is_locked(board.other, PAUSE_LOCK)
    go_on()
    assert try_lock(board.other, PAUSE_LOCK)
    with pytest.raises(Busy, match="for 0.1 s"):
        timed.pause(0.1)
    assert 0.0999 < sum(clock.slept[4:]) < 0.102


def test_a_binding_is_looked_for_every_few_milliseconds_with_the_time_that_is_left(timed: Any, clock: Eventful) -> None:
    timed.answers["bind"] = [binding(), binding(), binding(settled=True)]
    timed.bind(BindRequest(), 2.0)
    assert timed.given == pytest.approx([2.0, 1.995, 1.99])
    timed.answers["bind"] = binding()
    clock.slept.clear()
    with pytest.raises(Timeout, match="within 0.2 s"):
        timed.bind(BindRequest(), 0.2)
    assert set(clock.slept) == {0.005} and 0.1999 < sum(clock.slept) < 0.21
    assert min(timed.given) == 0.1


def test_engines_are_not_told_to_go_on_over_a_connection_that_is_closed(timed: Any, board: Board) -> None:  # noqa: F811
    go_on = timed.pause(60.0)
    timed._closed = True
    go_on()
    assert len(timed.told) == 1 and not is_locked(board.other, PAUSE_LOCK)


# ---- weights


class Channels:
    """Maps channels, which tell whether they were closed."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.happens: Callable[[], object] = lambda: None

    def attach(self, name: str) -> Any:
        made = Channel(name)
        self.made.append(made)
        self.happens()
        return made


class Channel:
    def __init__(self, name: str) -> None:
        self.name, self.closed = name, False

    def owner_lives(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> Channels:
    made = Channels()
    monkeypatch.setattr(local_link, "WeightsChannel", made)
    for name in ("Publisher", "WeightsReader"):
        monkeypatch.setattr(local_link, name, lambda *given, **more: SimpleNamespace(given=given, more=more))
    return made


def told(state: str, weights: str = "") -> ControlReply:
    return ControlReply(model=ModelMessage(state=state, weights=weights, index=2, engines=[1], max_lag=9))


def test_a_models_channel_is_waited_for_while_it_loads(timed: Any, channels: Channels, clock: Eventful) -> None:
    timed.answers["model"] = [told("loading"), told("loading"), told("ready", "there")]
    publisher: Any = timed.publisher("m", "exact", 2.0, driver="driver")
    assert clock.slept == [local_link.POLL] * 2
    assert publisher.given == tuple(channels.made) and publisher.more == {"owns": True, "driver": "driver"}
    assert channels.made[0].name == "there" and not channels.made[0].closed
    timed.answers["model"] = told("loading")
    with pytest.raises(Refused, match="model 'm' is loading and has no weights channel yet"):
        timed.publisher("m", "exact", 1.0)
    assert 0.9999 < sum(clock.slept[2:]) < 1.1 and len(channels.made) == 1


def test_a_reader_is_told_what_its_model_allows_and_which_version_is_in_use(
    timed: Any, board: Board, channels: Channels  # noqa: F811
) -> None:  # fmt: skip
    timed.answers["model"] = told("ready", "there")
    reader: Any = timed.weights("m", 2.0)
    channel, max_lag, in_use, lives = reader.given
    assert (channel, max_lag, reader.more) == (channels.made[0], 9, {"owns": True}) and lives == channel.owner_lives
    board.counters["version"][:, 2] = 5, 7
    assert in_use() == 7, "of the only engine that computes it"


def test_a_connection_closes_its_channels_also_one_that_was_being_opened(timed: Any, channels: Channels) -> None:
    timed.answers["model"] = told("ready", "there")
    kept = timed.publisher("m", "exact", 2.0)
    timed._wires = None

    channels.happens = timed.close
    with pytest.raises(Refused, match="this connection was closed: connect again"):
        timed.weights("m", 2.0)
    assert [channel.closed for channel in channels.made] == [True, True] and kept.given == (channels.made[0],)


def test_a_forked_child_leaves_its_parents_pauses_and_channels_alone(timed: Any, board: Board) -> None:  # noqa: F811
    parent: LocalLink = timed
    closed: list[str] = []
    board.segment.close = lambda: closed.append("board")
    go_on = parent.pause(60.0)
    parent._channels.add(channel := Channel("there"))  # type: ignore[arg-type]
    parent._entering = (board, 3)  # type: ignore[assignment]
    before = parent._pausing._lock
    parent._after_fork_in_child()
    assert closed == ["board"] and parent.scoreboard is None and not channel.closed
    assert not parent._channels and not parent._pauses and parent._entering is None
    assert parent._pausing._lock is not before
    go_on()
    assert is_locked(board.other, PAUSE_LOCK) and [kind for kind, _ in timed.told] == ["pause"]
    assert isinstance(parent._pauses, weakref.WeakSet) and parent._wires is None


def test_a_pause_waits_for_that_of_another_thread_only_as_long_as_it_may(timed: Any) -> None:
    held, let_go = threading.Event(), threading.Event()

    def begin() -> None:
        with timed._pausing.within(1.0):
            held.set()
            let_go.wait(20)

    thread = threading.Thread(target=begin)
    thread.start()
    try:
        assert held.wait(60)
        with pytest.raises(Timeout, match="a pause's beginning or end in another thread did not end within"):
            timed.pause(0.01)
    finally:
        let_go.set()
        thread.join(60)
    assert not timed.told and not timed._pauses
