"""ZeroMQ over a socket of the caller's own: what libzmq sees of it, and what becomes of tickets when it breaks."""

import asyncio
import contextlib
import errno
import mmap
import os
import resource
import signal
import socket
import struct
import time
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from tests.clocks import Clock, given
from tests.moments import each_moment
from tests.serving import wait_until

from jurybox import native
from jurybox.client.control import Wires
from jurybox.client.in_flight import LOOK_AFTER, Answer, InFlight
from jurybox.client.link import RowsHere
from jurybox.client.remote.connection import Connection
from jurybox.client.remote.tcp import TcpTransport
from jurybox.client.transports import engine_link, zmq_socket
from jurybox.client.transports.direct import dial
from jurybox.client.transports.engine_link import EngineCaller, EngineLink
from jurybox.client.transports.transport import NOT_ANSWERED, RowPlace
from jurybox.client.transports.zmq import ZmqTransport
from jurybox.client.transports.zmq_socket import ZmqSocket
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.errors import Code, ProtocolMismatch, TooManyFiles
from jurybox.protocol.scoreboard import ENGINE, EngineState
from jurybox.protocol.wire import PACK_REPLY, PACK_TICKET, PREFIX, lane_identity
from jurybox.server.relay.relayed_tickets import InlineTicket, RelayedTickets
from jurybox.server.relay.zmtp_listener import ZmtpListener

LANE, LEASE, LIFE = 3, 77, 9
# What opens a connection of ZeroMQ's (rfc.zeromq.org/spec/37).
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48) + b"\x04\x06\x05READY"


@pytest.fixture
def router():
    with zmq.Context() as context:
        made = context.socket(zmq.ROUTER)
        made.setsockopt(zmq.ROUTER_HANDOVER, 1)
        made.setsockopt(zmq.RCVTIMEO, 20_000)
        made.setsockopt(zmq.LINGER, 0)
        yield made
        made.close()


@pytest.fixture
def wires():
    made = Wires()
    yield made
    made.close()


@pytest.fixture(params=["own socket", "libzmq"])
def engine(request, router, wires, monkeypatch, tmp_path):
    """A link over a socket of our own, and one as where the native core is missing."""
    if request.param == "libzmq":
        monkeypatch.setattr(engine_link, "can_dial", lambda address: False)
    address = f"ipc://{tmp_path}/engine"
    router.bind(address)
    made = EngineLink(wires.context, address, LANE, LEASE, LIFE)
    yield made
    made.close()


def ticket(sequence):
    made = InFlight(sequence, 0, 1, 0, 0)
    made.engine, made.incarnation = 0, LIFE
    return made


def send(engine, sequence):
    engine.send(sequence, 0, 1, 0, 0, 0)


def sequence_of(frames):
    return PACK_TICKET.unpack_from(frames[1], len(PREFIX))[0]


def reply(router, sequence, code=0, text=b""):
    router.send_multipart(
        (lane_identity(LANE, LEASE), PREFIX + PACK_REPLY.pack(sequence, 1, LIFE, code) + text)
    )  # fmt: skip


def answers(engine):
    """The answers that arrive, which are settled then."""
    came = engine.answers(20.0)
    for answer in came:
        engine.settled(answer.sequence)
    return came


def break_off(router, engine):
    """Have the client end the connection: a call is interrupted within a message, or the router sends too much."""
    if isinstance(engine.link, ZmqSocket):
        engine.link.close()
        return
    router.send_multipart((lane_identity(LANE, LEASE), bytes(2 << 20)))
    wait_until(lambda: (engine.answers(0), engine.broken)[1], 20, "the connection is broken")


def test_a_ticket_is_in_flight_until_its_answer_is_taken_in(router, engine):
    send(engine, 5)
    wait_until(lambda: (engine.answers(0), router.poll(10))[1], 20, "the ticket came")
    identity, record = router.recv_multipart()
    assert identity == lane_identity(LANE, LEASE)
    assert PACK_TICKET.unpack_from(record, len(PREFIX))[:2] == (5, LEASE)
    assert engine.has(ticket(5))
    assert not engine.has(ticket(6))
    reply(router, 5, int(Code.MODEL_FAILED), b"so")
    (answer,) = answers(engine)
    assert (answer.sequence, answer.code, answer.message) == (5, Code.MODEL_FAILED, "so")
    assert not engine.has(ticket(5))


@pytest.mark.parametrize("code", [Code.OK, Code.MODEL_FAILED, Code.ROW_FAILED, Code.SESSION_LOST, Code.STALE_LEASE])
def test_requests_in_flight_on_a_broken_connection_count_if_answered_twice(router, engine, code):
    """The first answer may come while the second ticket is computed, which writes to the same rows."""
    send(engine, 5)
    wait_until(lambda: (engine.answers(0), router.poll(10))[1], 20, "the ticket came")
    router.recv_multipart()
    break_off(router, engine)
    engine.dial()
    assert engine.has(ticket(5)), "nobody knows whether the engine has it"
    wait_until(lambda: (engine.answers(0), router.poll(10))[1], 20, "it came again")
    again = sequence_of(router.recv_multipart())
    assert again != 5
    reply(router, 5)
    assert answers(engine) == []
    assert engine.has(ticket(5))
    assert not router.poll(100), "it is not sent a third time"
    reply(router, again, int(code))
    assert [(answer.sequence, answer.code) for answer in answers(engine)] == [(5, code)]
    assert not engine.has(ticket(5))


def test_a_ticket_that_the_engine_still_has_is_sent_again_later(router, engine):
    send(engine, 5)
    wait_until(lambda: (engine.answers(0), router.poll(10))[1], 20, "the ticket came")
    router.recv_multipart()
    break_off(router, engine)
    engine.dial()
    for _ in range(2):
        assert engine.has(ticket(5))
        wait_until(lambda: (engine.answers(0), router.poll(10))[1], 20, "it came again")
        again = sequence_of(router.recv_multipart())
        reply(router, again, int(Code.BUSY))
        assert answers(engine) == []
    assert engine.has(ticket(5))


def test_nobody_there_is_no_connection(wires, tmp_path):
    assert dial(f"ipc://{tmp_path}/nobody", b"", 1 << 20) is None
    engine = EngineLink(wires.context, f"ipc://{tmp_path}/nobody", LANE, LEASE, LIFE)
    send(engine, 5)
    assert engine.broken
    assert not engine.has(ticket(5)), "the lane sends it again"
    engine.close()


def test_who_waits_without_a_connection_sleeps_meanwhile(wires, tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr(engine_link, "time", SimpleNamespace(sleep=slept.append))
    engine = EngineLink(wires.context, f"ipc://{tmp_path}/nobody", LANE, LEASE, LIFE)
    assert engine.answers(0.01) == engine.answers(0.0) == engine.answers(9.0) == []
    assert slept == [0.01, LOOK_AFTER]


def test_a_forked_childs_end_leaves_the_parents_connection(router, engine):
    send(engine, 5)
    if (child := os.fork()) == 0:
        engine.close()
        os._exit(0)
    os.waitpid(child, 0)
    wait_until(lambda: (engine.answers(0), router.poll(10))[1], 20, "the ticket came")
    reply(router, sequence_of(router.recv_multipart()))
    assert [answer.sequence for answer in answers(engine)] == [5]


# ---- a connection to a relay


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("jurybox.client.remote.connection._TIMEOUT", 0.3)


def test_a_server_that_never_shakes_hands_is_gone(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr("jurybox.client.remote.connection._TIMEOUT", 1000.0)
        connection = Connection.direct(f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        assert connection.server_lives(), "it may still come"
        monkeypatch.setattr("jurybox.client.remote.connection._TIMEOUT", 0.3)
        wait_until(lambda: not connection.server_lives(), 20, "it was waited for long enough")
        connection.close()


def test_a_connection_that_ended_before_anybody_looked_at_it_is_reopened(router, impatient):
    port = router.bind_to_random_port("tcp://127.0.0.1")
    connection = Connection.direct(f"tcp://127.0.0.1:{port}")
    wait_until(lambda: (connection.link.look(), connection.link.ready)[1], 20, "it stands")
    time.sleep(0.4)  # longer than a server that is gone is waited for
    connection.link.close()
    assert connection.stands(), "the server lives"
    connection.close()


def test_a_connection_that_ended_is_reopened_and_its_requests_get_errors(router):
    port = router.bind_to_random_port("tcp://127.0.0.1")
    connection = Connection.direct(f"tcp://127.0.0.1:{port}")
    link = connection.link
    link.send(1, (PREFIX + bytes(64),))
    wait_until(lambda: (connection.server_lives(), router.poll(10))[1], 20, "it stands")
    life = connection.incarnation
    identity, _ = router.recv_multipart()
    router.send_multipart((identity, bytes(10)))
    wait_until(link.look, 20, "an answer came")
    router.unbind(f"tcp://127.0.0.1:{port}")
    link.close()
    assert connection.server_lives() and connection.incarnation == life, "the answer is read first"
    link.answers(0)
    assert connection.server_lives() and connection.incarnation == life + 1
    assert connection.engines["state"][0] == EngineState.ABSENT

    def bound():
        try:
            router.bind(f"tcp://127.0.0.1:{port}")
        except zmq.ZMQError as error:  # ZeroMQ's thread has not closed it yet, or another process has it open
            assert error.errno == zmq.EADDRINUSE
            return False
        return True

    wait_until(bound, 20, "the port is free")
    wait_until(
        lambda: connection.server_lives() and connection.engines["state"][0] == EngineState.SERVING, 20, "it is back"
    )
    assert connection.link is not link
    connection.close()


def test_a_host_that_vanished_is_noticed_while_an_answer_is_waited_for(router, monkeypatch):
    monkeypatch.setattr("jurybox.client.remote.connection.BEAT_MS", 50)
    monkeypatch.setattr("jurybox.client.remote.connection.SILENCE_MS", 1000)
    front = ZmtpListener("127.0.0.1:0", 1 << 20)
    connection = Connection.direct(f"tcp://{front.bound}")
    connection.link.send(1, (PREFIX + bytes(64),))
    wait_until(lambda: connection.server_lives() and front.receive(len), 20, "it stands")
    life = connection.incarnation
    until = time.monotonic() + 1.5
    while time.monotonic() < until:  # it is alive, and shows it without an answer
        connection.server_lives()
        front.receive(len)
        time.sleep(0.02)
    assert connection.incarnation == life
    wait_until(lambda: (connection.server_lives(), connection.incarnation)[1] > life, 20, "it says nothing any more")
    connection.close()
    front.close()


def test_a_host_has_its_time_to_answer_a_ping(monkeypatch):
    monkeypatch.setattr("jurybox.client.remote.connection.BEAT_MS", 50)
    front = ZmtpListener("127.0.0.1:0", 1 << 20)
    connection = Connection.direct(f"tcp://{front.bound}")
    connection.link.send(1, (PREFIX + bytes(64),))
    wait_until(lambda: connection.server_lives() and front.receive(len), 20, "it stands")
    life, link = connection.incarnation, connection.link
    wait_until(lambda: (connection.server_lives(), connection._pinged_at)[1] is not None, 20, "it was asked for a sign")
    assert connection.server_lives() and connection.incarnation == life and connection.link is link and not link.broken
    connection.close()
    front.close()


SPEC = ModelSpec("m", {"x": TensorSpec("float32", (2,))}, {"y": TensorSpec("float32", (2,))})


def connected(router):
    """A transport with an open connection to a substitute for the relay."""
    connection = Connection.direct(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
    rows = RowsHere(SPEC, 4)
    wait_until(lambda: connection.server_lives() and connection.link.ready, 20, "it stands")
    return connection, rows, TcpTransport(connection, rows, LEASE)


def row_place(connection, rows):
    x, y = rows.columns.inputs["x"][0], rows.columns.outputs["y"][0]
    return RowPlace(0, 1, SPEC.inputs["x"], x, None, y, connection.engines, connection.incarnation, 0)


def test_an_answer_that_takes_longer_than_a_check_is_received(router):
    """Dropped, its ticket would be sent again: every slow call would be computed twice."""
    connection, rows, transport = connected(router)
    call = transport.caller(row_place(connection, rows))
    assert call(np.ones(2, np.float32), 5, 0.01) == NOT_ANSWERED
    identity, record, _ = router.recv_multipart()
    life = PACK_TICKET.unpack_from(record, len(PREFIX))[-1]
    waiting = InFlight(5, 0, 1, 0, 0)
    waiting.incarnation = connection.incarnation
    assert transport.holds(waiting)
    router.send_multipart((identity, PREFIX + PACK_REPLY.pack(5, 1, life, 0), np.full(2, 3, np.float32).tobytes()))
    (answer,) = transport.receive(20.0)
    assert answer.sequence == 5 and transport.receive(0) == [answer] and transport.holds(waiting), "until it is settled"
    assert rows.columns.outputs["y"][0].tolist() == [3.0, 3.0]
    transport.settled(answer)
    assert not transport.holds(waiting) and not transport.receive(0)
    transport.close()


@pytest.fixture
def signals():
    """A signal with a handler that does nothing, again and again."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


def check_deadline(call, row):
    """A call without an answer, which a signal may end early, names the deadline of its ticket."""
    before = time.monotonic_ns()
    assert call(row, 5, 0.08) == NOT_ANSWERED
    assert before <= call.deadline - 80_000_000 <= time.monotonic_ns()


def serving():
    """An engine's record of the scoreboard."""
    states = np.zeros(1, ENGINE)
    states["incarnation"], states["state"] = LIFE, EngineState.SERVING
    return states


def test_a_caller_of_an_engine_names_its_deadline_if_a_signal_ends_its_wait(router, engine, signals):
    wait_until(lambda: (engine.answers(0), engine.link.look(), engine.link.ready)[-1], 20, "it is connected")
    check_deadline(EngineCaller(engine, RowPlace(0, 1, None, None, None, None, serving(), LIFE, 0)), None)


def test_a_caller_names_its_deadline_if_a_signal_ends_its_wait(router, signals):
    connection, rows, transport = connected(router)
    check_deadline(transport.caller(row_place(connection, rows)), np.ones(2, np.float32))
    transport.close()

    memory = np.frombuffer(mmap.mmap(-1, native.RINGS_BYTES), np.uint8)
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    client = native.ShmRingsClient(memory, 0, LEASE, wake, 0)
    check_deadline(native.ShmRingsCaller(client, None, None, serving(), 0, 1, LIFE, LOOK_AFTER), None)
    os.close(wake)


async def test_a_loop_is_notified_of_the_connection_after_a_closed_one(router):
    """The selector must not keep the number of a descriptor that another will get."""
    connection, _, transport = connected(router)
    told = asyncio.Event()
    transport.watch(asyncio.get_running_loop(), told.set)
    for _ in range(3):
        connection.link.close()  # as a connection without heartbeats, or with an unfinished handshake
        wait_until(lambda: connection.server_lives() and connection.link.ready, 20, "it is back")
        told.clear()
        connection.link.send(1, (PREFIX + bytes(64),))
        while not router.poll(10):
            connection.link.look()
        router.send_multipart((router.recv_multipart()[0], bytes(10)))
        await asyncio.wait_for(told.wait(), 20)
        connection.link.receive(0)
    transport.close()


# ---- the relay's side


@pytest.fixture
def front():
    made = ZmtpListener("127.0.0.1:0", 1 << 20)
    yield made
    made.close()


@pytest.fixture
def dealer(front):
    with zmq.Context() as context:
        made = []

        def open_one(identity):
            one = context.socket(zmq.DEALER)
            one.setsockopt(zmq.IDENTITY, identity)
            one.setsockopt(zmq.LINGER, 0)
            one.connect(f"tcp://{front.bound}")
            made.append(one)
            return one

        yield open_one
        for one in made:
            one.close()


def received(front, seconds=20.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (frames := front.receive(len)) is not None:
            return frames
        time.sleep(0.002)
    return None


def test_messages_go_to_and_fro_between_libzmq_and_the_relays_own_connections(front, dealer):
    one, large = dealer(b"Rone"), np.random.default_rng(0).bytes(700_000)
    one.send_multipart((b"a", large, b""))
    assert [bytes(frame) for frame in received(front)] == [b"Rone", b"a", large, b""]
    assert front.send((b"Rone", b"b", large))
    got = []
    wait_until(lambda: (front.receive(len), one.poll(10) and got.extend(one.recv_multipart()), got)[2], 20, "it came")
    assert got == [b"b", large]
    assert not front.send((b"Rnobody", b"b"))


def test_a_second_connection_of_a_name_is_served_when_the_first_has_ended(front, dealer):
    first = dealer(b"Rone")
    first.send(b"first")
    assert received(front) == [b"Rone", b"first"]
    second = dealer(b"Rone")
    second.send(b"second")
    assert received(front, 0.3) is None
    assert front.is_there(b"Rone")
    first.close()
    assert received(front) == [b"Rone", b"second"]
    assert front.is_there(b"Rone")
    second.close()
    wait_until(lambda: (front.receive(len), not front.is_there(b"Rone"))[1], 20, "nobody bears it")


def test_a_client_that_reads_nothing_is_sent_no_more_than_it_may_leave_unread(front, dealer):
    with socket.create_connection(tuple(front.bound.rsplit(":", 1))) as one:  # type: ignore[arg-type]
        link = dial(f"tcp://{front.bound}", b"Rone", 1 << 30)
        link.send(1, (b"hello",))
        wait_until(lambda: (link.look(), front.receive(len))[1], 20, "it is known")
        body = bytes(400_000)
        for _ in range(200):
            if not front.has_room(b"Rone", len(body)):
                break
            front.send((b"Rone", body))
        assert not front.has_room(b"Rone", len(body))
        assert sum(connection.link.pending for connection in front._named.values()) <= 1 << 20
        link.close()
        one.close()
    wait_until(lambda: (front.receive(len), front.forget_sent(), not front._connections)[2], 30, "both are gone")


def test_peers_with_invalid_or_too_large_messages_are_disconnected(front):
    host, port = front.bound.rsplit(":", 1)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(60)):
        with socket.create_connection((host, int(port))) as one:
            one.sendall(garbage)
            one.settimeout(0.01)

            def ended(one=one):
                front.receive(len)
                try:
                    return not one.recv(1024)
                except TimeoutError:
                    return False
                except ConnectionResetError:
                    return True

            wait_until(ended, 20, "the connection ends")
    assert not front._named


def test_a_flood_of_small_messages_does_not_delay_other_clients(front, dealer):
    host, port = front.bound.rsplit(":", 1)
    honest = dealer(b"Rhonest")
    honest.send(b"here")
    assert received(front) == [b"Rhonest", b"here"]
    with socket.create_connection((host, int(port))) as flood:
        flood.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            flood.sendall(GREETING + b"\x00\x00" * (1 << 20))
        assert received(front)[1] == b""
        honest.send(b"me, too")
        before = 0
        until = time.monotonic() + 20
        while (frames := received(front, 1.0)) != [b"Rhonest", b"me, too"]:
            before += 1
            assert frames is not None and time.monotonic() < until
            if before % 500 == 0:
                time.sleep(0.05)  # the honest one's thread may have its turn
        assert before < 15_000
        # All received messages are returned, also after the flood's end.
        flood.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
    while front.receive(len) is not None:
        before += 1
    assert before > 20_000
    wait_until(lambda: (front.receive(len), front.forget_sent(), len(front._connections))[2] == 1, 20, "it is gone")


def test_a_large_frame_that_arrives_slowly_counts_as_a_sign_of_life(front, monkeypatch):
    monkeypatch.setattr("jurybox.server.relay.zmtp_listener._BEAT", 0.1)
    monkeypatch.setattr("jurybox.server.relay.zmtp_listener._SILENCE", 1.0)
    host, port = front.bound.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(GREETING + b"\x02" + (800_000).to_bytes(8, "big") + bytes(200_000))
        until = time.monotonic() + 2.0
        sent = 200_000
        while time.monotonic() < until:
            slow.sendall(bytes(100))
            sent += 100
            assert front.receive(len) is None
            front.forget_sent()
            time.sleep(0.02)
        slow.sendall(bytes(800_000 - sent))
        assert len(received(front)[1]) == 800_000


@pytest.mark.parametrize("code", [Code.OK, Code.ROW_FAILED, Code.MODEL_FAILED])
def test_an_answer_is_copied_only_if_all_of_it_fits(code):
    """The relay drops messages that do not fit, so the whole answer must be requested again, with head and reasons."""
    rows = RowsHere(SPEC, 4)
    sent = InFlight(1, 0, 4, 0, 0)
    lane = SimpleNamespace(
        columns=rows.columns, transport=None, submit=lambda *_: sent, receive_now=lambda: None, rows=4
    )
    for room in (*range(0, 400, 3), *range(400, 12_000, 100)):
        held = RelayedTickets(lane, b"Rone", b"", None, 0, 4)
        held.submit(InlineTicket(b"Rone", 9, 10**9, 0, 4, 0, 1), [bytes(32)])
        sent.answer = Answer(1, int(code), "why", 0, 1)
        came = list(held.answers(lambda _, size, room=room: size <= room))
        assert all(sum(map(len, frames)) <= room for frames in came)
        assert held.waits == (not came)
    assert came


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_relay_out_of_descriptors_accepts_waiting_clients_later(front, left):
    host, port = front.bound.rsplit(":", 1)
    waiting = [socket.create_connection((host, int(port))) for _ in range(3)]
    for one in waiting:
        one.sendall(GREETING + b"\x00\x02hi")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = [os.dup(0) for _ in range(left)]
    lowest = os.dup(0)  # all numbers below it are taken
    for number in (lowest, *spare):
        os.close(number)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        for _ in range(5):
            assert front.receive(len) is None or left == 2
            front.forget_sent()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    front.forget_sent()
    if not left:  # no connection was accepted
        assert [received(front)[1] for _ in waiting] == [b"hi"] * 3
    for one in waiting:
        one.close()
    with socket.create_connection((host, int(port))) as last:
        last.sendall(GREETING + b"\x00\x04last")
        wait_until(lambda: (front.receive(len) or [b""])[-1] == b"last", 20, "it is heard")


def test_a_socket_whose_connection_could_not_be_made_is_closed_once(monkeypatch):
    """Closed twice, the second close is of whatever got its number in between."""
    ours, theirs = socket.socketpair()
    number = ours.fileno()
    monkeypatch.setattr("jurybox.client.transports.direct._local", lambda path: ours)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    closed, close = [], os.close
    monkeypatch.setattr(os, "close", lambda descriptor: (closed.append(os.fstat(descriptor)), close(descriptor)))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        with pytest.raises(TooManyFiles):
            dial("ipc:///somewhere", b"", 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(closed) == 1, "it was open until its owner closed it"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    theirs.close()


@pytest.mark.parametrize(("number", "error"), [(errno.EMFILE, TooManyFiles), (errno.ECONNREFUSED, None)])
def test_only_a_process_without_files_is_told_so_others_may_try_again(monkeypatch, number, error):
    def fails(path):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("jurybox.client.transports.direct._local", fails)
    if error is None:
        assert dial("ipc:///somewhere", b"", 1 << 20) is None
    else:
        with pytest.raises(error, match="no socket to ipc:///somewhere"):
            dial("ipc:///somewhere", b"", 1 << 20)


def test_ctrl_c_while_an_answer_is_settled_leaves_no_ticket_that_waits_for_nothing(router, engine):
    """Either its answer is still here, or the engine does not count as having the ticket."""

    def interrupt():
        raise KeyboardInterrupt

    fell = 0
    for sequence, moment in enumerate(each_moment((engine_link.__file__, zmq_socket.__file__), interrupt), 7):
        send(engine, sequence)
        wait_until(lambda: (engine.answers(0), router.poll(10))[1], 20, "the ticket came")
        router.recv_multipart()
        reply(router, sequence)
        assert engine.answers(20.0)
        with contextlib.suppress(KeyboardInterrupt), moment:
            engine.settled(sequence)
        assert engine.has(ticket(sequence)) == bool(engine.answers(0))
        engine.settled(sequence)
        fell += moment.fell
    assert fell > 3


@pytest.fixture
def over_libzmq(monkeypatch):
    monkeypatch.setattr(engine_link, "can_dial", lambda address: False)


@pytest.fixture
def transport(over_libzmq, router, wires, tmp_path):
    """Over libzmq, to an engine that the router stands for, and to one that is not there."""
    address = f"ipc://{tmp_path}/engine"
    router.bind(address)
    made = ZmqTransport(wires.context, [address, f"ipc://{tmp_path}/other"], LANE, LEASE)
    yield made
    made.close()


def taken(router):
    """A ticket's sequence, once it came."""
    wait_until(lambda: router.poll(10), 20, "the ticket came")
    return sequence_of(router.recv_multipart())


@pytest.mark.parametrize("own", [True, False])
def test_a_wait_for_several_engines_wakes_for_each(monkeypatch, wires, tmp_path, own):
    if not own:
        monkeypatch.setattr(engine_link, "can_dial", lambda address: False)
    with zmq.Context() as context, contextlib.ExitStack() as undo:
        addresses = [f"ipc://{tmp_path}/{name}" for name in ("one", "two")]
        for address in addresses:
            undo.callback((router := context.socket(zmq.ROUTER)).close, 0)
            router.bind(address)
        transport = ZmqTransport(wires.context, addresses, LANE, LEASE)
        undo.callback(transport.close)
        links = [transport._attached(number, LIFE).link for number in (0, 1)]
        polled = []
        monkeypatch.setattr(zmq, "zmq_poll", lambda *given: polled.append(given))
        assert not transport.receive(0.0) and not polled
        assert not transport.receive(1.5)
        watched = {(link.descriptor if own else link.socket, zmq.POLLIN) for link in links}
        assert [(set(sockets), time_out) for sockets, time_out in polled] == [(watched, 1500)]


@pytest.mark.parametrize("within", ["_send", "_receive", "_poll", "poll of several"])
@pytest.mark.parametrize("end", ["engine", "transport", "link"])
def test_a_socket_of_libzmq_is_closed_by_the_last_call_within_it(over_libzmq, monkeypatch, tmp_path, within, end):
    """As pyzmq runs a signal handler that closes it, when it has looked whether it is open."""
    wires, open_within = Wires(), []
    transport = ZmqTransport(wires.context, [f"ipc://{tmp_path}/engine", f"ipc://{tmp_path}/other"], LANE, LEASE)
    engine = transport._attached(0, LIFE)
    socket_of_libzmq = engine.link.socket
    ends = {"engine": lambda: transport._drop((0, LIFE)), "transport": transport.close, "link": wires.leave}

    def nested(*_):
        if not open_within:
            ends[end]()
            open_within.append(not socket_of_libzmq.closed)
        raise zmq.Again

    if within == "poll of several":
        transport._attached(1, LIFE)
        monkeypatch.setattr(zmq, "zmq_poll", nested)
    else:
        setattr(engine.link, within, nested)
    with contextlib.suppress(zmq.Again, zmq.ContextTerminated):
        if within == "_send":
            engine.send(1, 0, 1, 0, 0, 0)
        else:
            transport.receive(0.01)
    assert open_within == [True]
    wait_until(lambda: socket_of_libzmq.closed, 20, "it is closed")
    transport.close()
    wires.close()


@pytest.mark.parametrize("how", ["receive", "exchange"])
def test_an_answer_received_while_its_ticket_is_sent_again_does_not_count(router, transport, how):
    """libzmq has given the frame to a call that has not returned it, and one that is nested in it looks for it."""
    first = transport._attached(0, LIFE).link
    send, receive, seen = first._send, first._receive, []

    def sent(*given):
        send(*given)
        reply(router, taken(router))

    def received(*given):
        frames = receive(*given)
        if not seen:
            seen.append(transport.holds(ticket(5)))  # the call that this one is nested in has its answer
            seen.append(transport._attached(0, LIFE).link is not first)
            seen.append(taken(router))
        return frames

    first._send, first._receive = sent, received
    if how == "exchange":
        came = transport.exchange(ticket(5), 20.0)
    else:
        transport.send(ticket(5))
        came = transport.receive(20.0)
    assert not came, "the first answer does not count: the second may write to the rows"
    held, replaced, again = seen
    assert held and replaced and again != 5
    reply(router, again)
    (answer,) = transport.receive(20.0)
    assert answer.sequence == 5
    transport.settled(answer)
    assert not transport.holds(ticket(5)) and not transport.receive(0)


def test_an_answer_received_when_its_socket_was_replaced_is_there_until_it_is_settled(router, transport):
    """Its ticket is not sent again: the rows could be others' when the second one is computed."""
    transport.send(ticket(5))
    first = transport._attached(0, LIFE).link
    receive = first._receive
    reply(router, taken(router))

    def received(*given):
        frames = receive(*given)
        transport._attached(0, LIFE)
        return frames

    first._receive = received
    (answer,) = transport.receive(20.0)
    assert answer.sequence == 5 and transport.holds(ticket(5)) and transport.receive(0) == [answer]
    assert not router.poll(100)
    transport.settled(answer)
    assert not transport.holds(ticket(5)) and not transport.receive(0)


def test_an_answer_of_one_engine_is_waited_for_beside_a_broken_connection_to_another(router, transport):
    transport._attached(1, LIFE).link.close()
    transport.send(ticket(5))
    asked = taken(router)
    assert not transport.receive(0.01)
    reply(router, asked)
    assert [answer.sequence for answer in transport.receive(20.0)] == [5]


def test_a_ticket_that_the_engine_has_already_is_sent_again_with_another_number_until_it_is_computed(router, engine):
    """It came over a connection that has broken; the first answer may be of either copy."""
    send(engine, 5)
    wait_until(lambda: (engine.answers(0), router.poll(10))[1], 20, "the ticket came")
    reply(router, sequence_of(router.recv_multipart()), int(Code.BUSY))
    wait_until(lambda: engine.link.look() or bool(engine.link.answers(0)), 20, "it is refused")
    assert engine.answers(0) == [] and engine.has(ticket(5))
    wait_until(lambda: (engine.answers(0), router.poll(10))[1], 20, "it came again")
    again = sequence_of(router.recv_multipart())
    assert again != 5
    reply(router, again)
    assert [answer.sequence for answer in answers(engine)] == [5] and not engine.has(ticket(5))


def test_an_exchange_that_is_refused_as_a_second_copy_is_no_answer(engine):
    busy = Answer(5, Code.BUSY, "", 0, LIFE)
    assert engine.own(busy, 5) is None and engine.has(ticket(5)), "it is sent again"
    other = Answer(0, Code.PROTOCOL_MISMATCH, "", 0, LIFE)
    assert engine.own(other, 6) is other and not engine.has(ticket(6))


def test_an_answer_that_came_over_a_replaced_connection_stays_until_it_is_settled(router, engine):
    send(engine, 5)
    wait_until(lambda: (engine.answers(0), router.poll(10))[1], 20, "the ticket came")
    reply(router, sequence_of(router.recv_multipart()))
    assert engine.answers(20.0)
    engine.dial()
    for _ in range(2):
        (answer,) = engine.answers(20.0)
        assert answer.sequence == 5 and engine.has(ticket(5))
    engine.settled(5)
    assert not engine.answers(0) and not engine.has(ticket(5)) and not router.poll(100)


def test_what_is_no_reply_is_an_error_once(router, engine):
    """Kept, it would end every later call on this lane."""
    send(engine, 5)
    wait_until(lambda: (engine.answers(0), router.poll(10))[1], 20, "the ticket came")
    identity, _ = router.recv_multipart()
    router.send_multipart((identity, PREFIX + (5).to_bytes(8, "little")))
    with pytest.raises(ProtocolMismatch, match="an engine answered what is no reply"):
        wait_until(lambda: engine.answers(0.1), 20, "it came")
    assert not engine.answers(0)


def test_a_reply_of_no_ticket_is_settled_whichever_engine_it_names(router, transport):
    """An engine that cannot read a message knows neither its number nor its own incarnation there."""
    transport.send(ticket(5))
    taken(router)
    head = PREFIX + PACK_REPLY.pack(0, 0, 0, int(Code.PROTOCOL_MISMATCH))
    router.send_multipart((lane_identity(LANE, LEASE), head + b"speak my version"))
    (answer,) = transport.receive(20.0)
    assert (answer.sequence, answer.message) == (0, "speak my version")
    transport.settled(answer)
    assert not transport.receive(0) and transport.holds(ticket(5))


def test_an_engine_that_has_started_again_is_connected_to_anew_and_its_answers_settle_no_earlier_ones(
    router, transport
):
    transport.send(ticket(5))
    reply(router, taken(router))
    (answer,) = transport.receive(20.0)
    transport.settled(answer._replace(incarnation=LIFE + 1))
    assert transport.receive(0) == [answer] and transport.holds(ticket(5))
    first = transport._attached(0, LIFE).link
    other, later = ticket(6), ticket(6)
    other.engine, later.incarnation = 1, LIFE + 1
    beside = transport._attached(1, LIFE).link
    transport.send(later)
    assert first.broken and transport.holds(later) and not transport.holds(ticket(5)) and not transport.holds(other)
    assert not beside.broken, "it has not ended"


@pytest.mark.parametrize("engines", [1, 2])
def test_a_wait_of_less_than_a_millisecond_is_a_wait(transport, monkeypatch, engines):
    """Rounded down, whoever waits in short steps would never let other threads run."""
    waits = []
    for engine in range(engines):
        transport._attached(engine, LIFE).link._poll = waits.append
    monkeypatch.setattr(zmq, "zmq_poll", lambda polled, timeout: (len(polled) == 2 and waits.append(timeout), [])[1])
    for seconds in (0.0001, 0.001, 0.0011, 0.0):
        assert not transport.receive(seconds)
    assert waits == [1, 1, 2]


def test_an_answer_is_not_waited_for_within_a_message(transport, router, monkeypatch):
    """A nested call would connect while this connection is open, which would take the lane's name back."""
    clock = given(Clock(), monkeypatch, zmq_socket)
    link = transport._attached(0, LIFE).link
    called, receive = [], link._receive
    link._poll = lambda ms: (called.append(ms), clock.sleep(ms / 1000), link.torn and called.append("torn"), [])[-1]
    link._receive = lambda flags: (called.append(flags), receive(flags))[1]
    assert link.exchange(5, (b"five",), 0.05) is None and link.holds(5) and not link.torn and called == [50]
    wait_until(lambda: router.poll(10), 20, "it came")
    reply(router, 5)
    wait_until(lambda: link.answers(0), 20, "another's answer came")
    reply(router, 8)
    wait_until(lambda: len(link.answers(0)) == 2, 20, "both came")
    (_, others), (_, mine) = link.answers(0)
    assert 0 not in called
    called.clear()
    assert link.exchange(8, (b"eight",), 20.0) == mine != others and not called, "it was here before"
    assert link.holds(5) and not link.holds(8)


def test_an_error_without_a_number_is_the_answer_to_whatever_is_exchanged(transport, router):
    link = transport._attached(0, LIFE).link
    link.send(5, (b"five",))
    wait_until(lambda: router.poll(10), 20, "it came")
    reply(router, 0, Code.MALFORMED, b"why")
    (frame,) = link.exchange(6, (b"six",), 20.0)
    assert frame.endswith(b"why") and not link.answers(0)


def test_a_message_for_which_there_is_no_room_is_not_in_flight(transport):
    def full(*_):
        raise zmq.Again

    link = transport._attached(0, LIFE).link
    send, link._send = link._send, full
    assert not link.send(5, (b"five",)) and not link.holds(5) and not link.unanswered and not link.torn
    link._send = send
    assert link.send(5, (b"five",)) and link.holds(5) and link.unanswered == [5]


@pytest.mark.parametrize(("address", "beat", "silence"), [("tcp://127.0.0.1:1", 2000, 10_000), ("ipc://here", 0, -1)])
def test_libzmq_watches_the_peer_of_another_host_alone(wires, address, beat, silence):
    """On this host the kernel tells of the peer's end, and one that was stopped for a while may go on."""
    made = zmq_socket.new_socket(wires.context, address, None, b"me")
    told = [made.getsockopt(each) for each in (zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT, zmq.LINGER, zmq.IPV6)]
    assert told == [beat, silence, 0, 1]
    assert made.getsockopt(zmq.IDENTITY) == b"me" and made.getsockopt(zmq.MAXMSGSIZE) == 1 << 30
    assert zmq_socket.new_socket(wires.context, address, None, b"").getsockopt(zmq.IDENTITY) == b""
