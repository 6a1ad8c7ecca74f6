"""What a client of a server on this host does with the locks, the pauses and the words of the server."""

from __future__ import annotations

import os
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from jurybox.client import local_link
from jurybox.client.local_link import LocalLink
from jurybox.client.transports.zmq import ZmqTransport
from jurybox.protocol.control_pb2 import BindingMessage, BindRequest, ControlReply, Lease, ModelMessage, ServerMessage
from jurybox.protocol.errors import (
    Busy,
    ModelFailed,
    Refused,
    ServerGone,
    SharedMemoryError,
    Timeout,
    TooManyFiles,
)
from jurybox.protocol.locks import TimedLock
from jurybox.protocol.scoreboard import ENGINE, LANE_LOCK, PAUSE_LOCK, EngineState
from jurybox.protocol.segment import is_locked, try_lock

SERVING = int(EngineState.SERVING)


class Board:
    """A scoreboard of two engines, whose file is open twice: by the link, and by another client."""

    def __init__(self, path):
        path.touch()
        self.segment = SimpleNamespace(fd=os.open(path, os.O_RDWR), name="board")
        self.other = os.open(path, os.O_RDWR)
        self.engines = np.zeros(2, ENGINE)
        self.engines["state"], self.engines["paused"] = SERVING, 1
        self.counters = np.zeros((2, 3), [("version", np.uint64)])
        self.lives = True

    def server_lives(self):
        return self.lives


@pytest.fixture
def board(tmp_path):
    made = Board(tmp_path / "board")
    yield made
    os.close(made.segment.fd)
    os.close(made.other)


@pytest.fixture
def link(board):
    """A link to a server that answers each call with what `answers` has, and `told` what it was asked."""
    made = LocalLink.__new__(LocalLink)
    made.told, made.answers = [], {}

    def call(timeout, *_, **request):
        ((kind, body),) = request.items()
        made.told.append((kind, body))
        answer = made.answers.get(kind, ControlReply())
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    made._call = call
    made._control = lambda timeout: SimpleNamespace(call=call)
    made._address, made._closed, made._transport, made._entering = "ipc://here", False, "auto", None
    made._lock, made._pausing = TimedLock("a lease"), TimedLock("a pause's beginning or end")
    made._pauses, made._channels = weakref.WeakSet(), weakref.WeakSet()
    made.scoreboard, made._spin_us, made._info = board, 0, ServerMessage()
    made._lane = lambda scoreboard, lease: f"lane {lease.lane}"
    return made


def lease_of(lane):
    made = Lease(lane=lane, lease=70 + lane, model=ModelMessage(name="m", max_batch=9))
    for tensors in (made.model.inputs, made.model.outputs):
        tensors.add(name="x", dtype="float32")
    return made


def locked(board, lane):
    return is_locked(board.other, LANE_LOCK + lane)


# ---- lanes


def test_a_lane_is_locked_as_long_as_it_is_held_and_left_to_another_that_holds_it(link, board):
    assert link.enter(lease_of(3)) == "lane 3" and locked(board, 3) and not locked(board, 4)
    assert try_lock(board.other, LANE_LOCK + 5)
    assert link.enter(lease_of(5)) is None and not link.told, "the server will find it locked"
    assert link.enter(lease_of(6)) == "lane 6" and locked(board, 3)


@pytest.mark.parametrize("wait", [True, False])
def test_a_lease_of_a_lane_that_another_holds_is_asked_for_again_while_there_is_time(link, board, wait):
    assert try_lock(board.other, LANE_LOCK + 5)
    link.answers["lease"] = [ControlReply(lease=lease_of(5)), ControlReply(lease=lease_of(6))]
    if not wait:
        with pytest.raises(Busy, match="lane 5 of 'm' is locked by another client"):
            link.lease("m", 4, 60.0, wait=False)
        return
    lane, spec, most = link.lease("m", 4, 60.0)
    assert (lane, spec.name, most) == ("lane 6", "m", 9) and [kind for kind, _ in link.told] == ["lease"] * 2


@pytest.mark.parametrize("error", [ModelFailed("no arena"), KeyboardInterrupt()])
def test_a_lane_that_could_not_be_opened_is_given_back_and_its_lock_released(link, board, error):
    def fail(*_):
        raise error

    link._lane = fail
    with pytest.raises(type(error)):
        link.enter(lease_of(3))
    assert not locked(board, 3) and link._entering is None
    ((kind, request),) = link.told
    assert (kind, request.lane, request.lease) == ("release", 3, 73)


def test_a_lane_whose_opening_was_interrupted_is_unlocked_by_the_next(link, board):
    link._entering = (board, 3)
    assert try_lock(board.segment.fd, LANE_LOCK + 3) and locked(board, 3)
    assert try_lock(board.other, LANE_LOCK + 5)
    assert link.enter(lease_of(5)) is None and not locked(board, 3) and link._entering is None


def test_a_lane_is_given_back_if_this_process_may_open_too_few_files_for_it(link, monkeypatch):
    def require(files, what):
        raise TooManyFiles(f"{what} needs {files}")

    monkeypatch.setattr(local_link, "require", require)
    with pytest.raises(TooManyFiles, match="a lane of 'm' needs 10"):
        link.enter(lease_of(3))
    assert [kind for kind, _ in link.told] == ["release"]


@pytest.mark.parametrize("why", ["closed", "its server is gone", "no answer"])
def test_a_lane_can_be_left_whatever_became_of_its_server(link, board, why):
    link._closed, board.lives = why == "closed", why != "its server is gone"
    link.answers["release"] = ServerGone("no answer")
    link._release(board, lease_of(3))
    assert len(link.told) == (why == "no answer")


def test_nothing_is_leased_over_a_connection_that_was_closed_meanwhile(link):
    link.scoreboard = None
    for ask in (lambda: link.enter(lease_of(3)), lambda: link._version_in_use(0, [])):
        with pytest.raises(Refused, match="this connection was closed: connect again"):
            ask()
    link._greet = lambda timeout: None
    with pytest.raises(Refused, match="this connection was closed"):
        link.lease("m", 4, 60.0)


# ---- pauses


def paused(board):
    return is_locked(board.other, PAUSE_LOCK)


def asked(link):
    return [request.pause for kind, request in link.told if kind == "pause"]


def test_pauses_of_a_link_share_the_lock_and_the_last_one_goes_on(link, board):
    first, second = link.pause(60.0), link.pause(60.0)
    assert paused(board) and asked(link) == [True, True]
    for _ in range(2):
        first()
    assert paused(board) and asked(link) == [True, True]
    for _ in range(2):
        second()
    assert not paused(board) and asked(link) == [True, True, False]
    link.pause(60.0)()
    assert asked(link) == [True, True, False, True, False]


def test_no_process_pauses_while_another_does(link, board):
    assert try_lock(board.other, PAUSE_LOCK)
    with pytest.raises(Busy, match="another process has had the engines paused for 0.0 s"):
        link.pause(0.0)
    assert not link.told and not link._pauses


@pytest.mark.parametrize("why", ["it computes", "its server is gone", "it serves nothing"])
def test_a_pause_begins_when_every_serving_engine_is_between_two_batches(link, board, why):
    board.engines["paused"] = 1, 0
    if why == "it serves nothing":
        board.engines["state"][1] = int(EngineState.LOADING)
        link.pause(60.0)()
        return
    if why == "it computes":
        with pytest.raises(Timeout, match="engine 1 has been in a batch for 0.0 s: increase the time-out"):
            link.pause(0.0)
    else:
        link.answers["pause"] = [ControlReply(), ControlReply()]
        link._served = lambda timeout: board
        board.lives = False
        with pytest.raises(ServerGone, match="the server ended before its engines paused"):
            link.pause(60.0)
    assert not paused(board) and not link._pauses
    assert asked(link) == [True] + [False] * (why == "it computes")


def test_engines_go_on_also_if_the_server_does_not_answer(link, board):
    link.answers["pause"] = [ControlReply(), ServerGone("no answer")]
    link.pause(60.0)()
    assert not paused(board) and asked(link) == [True, False]


# ---- what the server says


def binding(**given):
    return ControlReply(binding=BindingMessage(**given))


def test_a_binding_is_asked_for_until_the_engines_have_settled_it(link):
    link.answers["bind"] = [binding(), binding(settled=True)]
    link.bind(BindRequest(), 60.0)
    assert len(link.told) == 2
    link.answers["bind"] = [binding(settled=True, reason="no such memory")]
    with pytest.raises(Refused, match="no such memory"):
        link.bind(BindRequest(), 60.0)
    link.answers["bind"] = binding()
    with pytest.raises(Timeout, match="engines have not opened or released device memory within 0.0 s"):
        link.bind(BindRequest(), 0.0)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (ModelMessage(state="ready"), "is ready and takes no publications: set publish in its configuration"),
        (ModelMessage(state="failed", reason="it has no file"), "is failed and it has no file"),
        (ModelMessage(state="loading"), "is loading and has no weights channel yet"),
    ],
)
def test_a_model_without_a_weights_channel_says_why(link, message, told):
    link.answers["model"] = ControlReply(model=message)
    with pytest.raises(Refused, match=f"model 'm' {told}"):
        link.weights("m", 0.0)


def test_the_version_in_use_is_the_oldest_of_the_serving_engines_of_the_model(link, board):
    board.counters["version"] = [[1, 7, 1], [1, 5, 1]]
    assert [link._version_in_use(1, engines) for engines in ([], [0], [1], [0, 1], [8])] == [5, 7, 5, 5, 0]
    board.engines["state"][1] = int(EngineState.LOADING)
    assert [link._version_in_use(1, engines) for engines in ([], [1])] == [7, 0]


def test_memory_of_a_server_that_has_just_been_replaced_is_looked_for_once_more(link, monkeypatch):
    """Its name may be that of the server before; the same name twice is of memory that is not here."""
    names = ["first", "second", "second"]
    link.answers["hello"] = [ControlReply(server=ServerMessage(scoreboard=name)) for name in names]

    def attach(name):
        raise SharedMemoryError(f"no {name}")

    monkeypatch.setattr(local_link.Scoreboard, "attach", attach)
    with pytest.raises(
        SharedMemoryError, match="the server at ipc://here answers, but its shared memory second is not"
    ):
        link._greet(60.0)
    assert not link.answers["hello"] and link.scoreboard is None


@pytest.mark.parametrize("cause", [PermissionError(), FileNotFoundError()])
def test_memory_that_cannot_be_opened_is_an_error_with_its_remedy(cause):
    error = SharedMemoryError("no")
    error.__cause__ = cause
    told = str(local_link._foreign_memory("ipc://here", "board", error))
    remedy = "run this process as the server's user" if isinstance(cause, PermissionError) else "Set JURYBOX_SHM_DIR"
    assert remedy in told and "ipc://here" in told and "board" in told


@pytest.mark.parametrize(
    ("wanted", "of_server", "opened"), [("auto", "shm", "zmq"), ("zmq", "shm", "zmq"), ("shm", "zmq", None)]
)
def test_without_the_native_core_only_who_asks_for_shm_is_refused(link, board, monkeypatch, wanted, of_server, opened):
    monkeypatch.setitem(sys.modules, "jurybox.client.transports.shm", None)
    link._transport, link._info = wanted, ServerMessage(transport=of_server, engines=["ipc://engine"])
    link._wires = SimpleNamespace(context=None)
    if opened is None:
        with pytest.raises(Refused, match="transport='shm' needs the native core, which is missing here"):
            link._open_transport(board, lease_of(3))
        return
    transport = link._open_transport(board, lease_of(3))
    assert type(transport) is ZmqTransport and transport._addresses == ["ipc://engine"]
    assert (transport._lane, transport._lease) == (3, 73)


SPINS = ("JURYBOX_SPIN_US", local_link._spin_us, "microseconds")
TRACES = ("JURYBOX_TRACES", local_link.wants_traces, "true or false")


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        *((SPINS, text, value) for text, value in ((None, 100), ("0", 0), ("7", 7))),
        *((SPINS, text, None) for text in ("-1", "", "1.5")),
        *((TRACES, text, value) for text, value in ((None, False), ("false", False), ("true", True))),
        *((TRACES, text, None) for text in ("1", "")),
    ],
)
def test_a_variable_with_another_text_than_is_expected_is_refused(monkeypatch, variable, text, value):
    name, read, expected = variable
    monkeypatch.delenv(name, raising=False)
    if text is not None:
        monkeypatch.setenv(name, text)
    if value is None:
        with pytest.raises(ValueError, match=f"{name}='{text}': expected {expected}"):
            read()
        return
    found = read()
    assert found == value and type(found) is type(value)


def test_a_connection_that_closes_closes_its_channels(link):
    closed = []

    class Channel:
        def close(self):
            closed.append(self)

    link._channels.add(channel := Channel())
    link._wires = None
    link.close()
    assert closed == [channel] and link.scoreboard is None and link.closed
