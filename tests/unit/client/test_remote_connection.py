"""The state of a connection to a tcp:// server is known at every moment."""

import contextlib
import os
import socket
import time
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from tests.clocks import Clock, given
from tests.moments import each_moment
from tests.serving import wait_until

from jurybox.client import ServerGone, connect
from jurybox.client.control import Wires
from jurybox.client.in_flight import InFlight
from jurybox.client.link import RowsHere
from jurybox.client.remote import connection as connection_module
from jurybox.client.remote.connection import IDLE, Connection
from jurybox.client.remote.tcp import SentRows, TcpTransport
from jurybox.client.transports import zmq_socket
from jurybox.client.transports.transport import NOT_ANSWERED, NOT_FIT, NOT_SENT, RowPlace
from jurybox.protocol import row_frames
from jurybox.protocol.errors import Code, ProtocolMismatch
from jurybox.protocol.scoreboard import EngineState
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.protocol.wire import PACK_REPLY, PACK_TICKET, PREFIX

SPEC = ModelSpec("m", {"x": TensorSpec("float32", (2,))}, {"y": TensorSpec("float32", (2,))})


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made
        made.destroy(linger=0)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("jurybox.client.remote.connection._TIMEOUT", 0.3)


def test_a_server_that_ends_before_the_connection_is_open_is_gone(context, impatient):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, and sends nothing
        connection = Connection.over_libzmq(context, f"tcp://127.0.0.1:{silent.getsockname()[1]}", None)
        assert connection.server_lives(), "it may still come"
        wait_until(lambda: not connection.server_lives(), 20, "it was waited for long enough")
        connection.close()


def test_an_idle_connection_stays_open(context, impatient):
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    connection = Connection.over_libzmq(context, f"tcp://127.0.0.1:{port}", None)
    connection.link.send(1, (b"hello",))
    assert router.poll(20_000), "it stands now"
    wait_until(connection.server_lives, 20, "its handshake is noticed")
    time.sleep(0.5)
    assert connection.server_lives()
    router.close(linger=0)
    wait_until(lambda: not connection.server_lives(), 20, "its end is noticed")
    connection.close()


def test_a_connection_to_this_host_says_that_it_waits_where_nothing_listens(monkeypatch, caplog):
    monkeypatch.setattr("jurybox.client.remote.tcp_link._ATTEMPT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as once:
        where = f"127.0.0.1:{once.getsockname()[1]}"
    with pytest.raises(ServerGone, match=f"within 1.0 s: .*; nothing listens on {where}$"):
        connect(f"tcp://{where}", timeout=1.0)
    assert caplog.text.count(f"waiting up to 1.0 s for a server at tcp://{where}; nothing listens") == 1


@pytest.fixture
def stood(context):
    """A connection over libzmq that stands, and what has its other end."""
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVTIMEO, 20_000)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    connection = Connection.over_libzmq(context, f"tcp://127.0.0.1:{port}", None)
    wait_until(lambda: connection.server_lives() and connection.link.ready, 20, "it stands")
    yield connection, router
    connection.close()
    router.close(linger=0)


def answered(router, number):
    """Answer the next message with two frames."""
    router.send_multipart((router.recv_multipart()[0], PREFIX + PACK_REPLY.pack(number, 1, 1, 0), b"out"))


def interrupt():
    raise KeyboardInterrupt


def entered(owner, name, action):
    """Let something else happen first within this method, as within pyzmq a signal handler, once."""
    method = getattr(owner, name)

    def within(*args, **options):
        setattr(owner, name, method)
        action()
        return method(*args, **options)

    setattr(owner, name, within)


def test_an_answer_stays_until_it_is_settled(stood):
    connection, router = stood
    link = connection.link
    assert link.send(5, (b"five", b"row")) and link.holds(5) and not link.holds(6)
    answered(router, 5)
    for _ in range(2):
        ((number, (_, out)),) = link.answers(20.0)
        assert (number, bytes(out)) == (5, b"out") and link.holds(5)
    link.settled(5)
    assert not link.answers(0) and not link.holds(5)


def test_an_exchange_leaves_the_answers_to_others(stood):
    connection, router = stood
    link = connection.link
    link.send(5, (b"five",))
    answered(router, 5)
    assert link.exchange(6, (b"six",), 0.01) is None and link.holds(6)
    wait_until(lambda: [number for number, _ in link.answers(0)] == [5], 20, "the answer to the other came")
    answered(router, 6)
    wait_until(lambda: len(link.answers(0)) == 2, 20, "both came")


@pytest.mark.parametrize("way", ["over_libzmq", "direct"])
def test_answers_that_came_before_the_end_of_a_connection_are_read_before_it_is_replaced(context, way):
    """A relay that stops sends what it has accepted, and ends: a client may find both at once."""
    with zmq.Context() as of_relay:
        router = of_relay.socket(zmq.ROUTER)
        router.setsockopt(zmq.RCVTIMEO, 20_000)
        where = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        connection = Connection.direct(where) if way == "direct" else Connection.over_libzmq(context, where, None)
        wait_until(lambda: connection.server_lives() and connection.link.ready, 20, "it stands")
        link, life = connection.link, int(connection.incarnation)
        transport = TcpTransport(connection, RowsHere(SPEC, 1), 1)
        transport._in_flight[5] = SentRows(0, 1, life)
        assert link.send(5, (b"five",))
        reply = PREFIX + PACK_REPLY.pack(5, 1, life, 0)
        router.send_multipart((router.recv_multipart()[0], reply, np.ones(2, np.float32).tobytes()))
        router.close(linger=20_000)
    if way == "over_libzmq":  # the context has ended, so all is here, but a thread of libzmq may not have read it
        assert link._events.poll(20_000)
    assert connection.server_lives() and connection.link is link and connection.incarnation == life
    (answer,) = transport.receive(0)
    assert (answer.sequence, answer.code) == (5, Code.OK)
    transport.settled(answer)
    assert connection.server_lives() and connection.link is not link and connection.incarnation == life + 1
    connection.close()


def test_a_call_within_a_message_replaces_the_connection_and_does_not_wait_for_it(stood):
    """Half a message may be in the socket: what is sent next would become its other half."""
    connection, router = stood
    link, life = connection.link, connection.incarnation
    entered(link, "_send", interrupt)
    with pytest.raises(KeyboardInterrupt):
        link.send(5, (b"five",))
    assert link.torn and not link.send(6, (b"six",)) and link.torn  # also if the next call is interrupted there
    connection.mend()
    assert connection.link is not link and link.broken and not link.holds(5)
    assert (connection.incarnation, connection.engines["state"][0]) == (life + 1, EngineState.SERVING)
    assert not link.send(6, (b"six",)) and link.exchange(6, (b"six",), 1.0) is None and not link.answers(0)
    connection.link.send(7, (b"seven",))
    wait_until(lambda: router.recv_multipart()[1] == b"seven", 20, "the next one is open")
    kept = connection.link
    connection.mend()
    assert connection.link is kept


CALLS = {
    "_send": lambda link: link.send(6, (b"six", b"row")),
    "_receive": lambda link: link.answers(0),
    "_poll": lambda link: link.answers(0.01),
    "poll": lambda link: link.look(),
}


@pytest.mark.parametrize("end", [lambda: None, interrupt], ids=["returns", "is interrupted"])
@pytest.mark.parametrize("where", CALLS)
def test_a_socket_stays_open_until_no_call_is_within_it(stood, where, end):
    """Else pyzmq would go on in freed memory, or in the next socket, which then lost answers and got half messages."""
    connection, _ = stood
    link, first, open_within = connection.link, connection.link.socket, []

    def nested():
        link.close()
        connection._dial()
        open_within.append(not first.closed)
        end()

    entered(link._events if where == "poll" else link, where, nested)
    with contextlib.suppress(KeyboardInterrupt):
        CALLS[where](link)
    assert open_within[0] and first.closed
    assert connection.link is not link and not connection.link.broken


@pytest.mark.parametrize("at", ["before it is opened", "while it is opened"])
def test_a_closed_connection_opens_no_socket_for_the_call_that_the_end_is_nested_in(stood, at):
    connection, _ = stood
    opens, opened = connection._open, []

    def nested(attempt):
        opened.append(opens(attempt))
        connection.close()
        return opened[-1]

    connection._open = nested
    if at == "before it is opened":
        connection.close()
    for _ in range(2):
        connection._dial()
        assert all(link.broken for link in opened) and len(opened) == (at == "while it is opened")
        assert connection.link is None or connection.link.broken


class Loop:
    """An event loop that only notes what it watches."""

    def __init__(self, entered) -> None:
        self.watched, self._entered = set(), entered

    def is_closed(self):
        return False

    def add_reader(self, descriptor, arrived):
        self._entered()
        self.watched.add(descriptor)

    def remove_reader(self, descriptor):
        self.watched.discard(descriptor)


@pytest.mark.parametrize(
    "how", ["it is closed first", "it is closed", "it is replaced", "it is replaced, and its descriptor closed"]
)
def test_an_event_loop_watches_the_next_link_wherever_the_earlier_one_ends(stood, how):
    connection, _ = stood
    earlier, following, entered = connection.link, connection._open(0), []
    connection._open = lambda _: following

    def nested():
        entered.append(how)
        if len(entered) > 1 or how == "it is closed first":
            return
        if how == "it is closed":
            earlier.close()
        else:
            connection._dial()
        if "descriptor" in how:
            raise OSError("bad file descriptor")

    transport, loop = TcpTransport(connection, RowsHere(SPEC, 4), 1), Loop(nested)
    if how == "it is closed first":
        earlier.close()
    transport.watch(loop, lambda: None)
    if connection.link is earlier:
        assert how == "it is closed" or not loop.watched
        connection._dial()
    assert connection.link is following and loop.watched == {following.descriptor}


def test_ctrl_c_anywhere_within_a_call_keeps_no_socket_open(stood):
    connection, _ = stood
    fell = 0
    for moment in each_moment((zmq_socket.__file__, contextlib.__file__), interrupt):
        connection._dial()
        link = connection.link
        with contextlib.suppress(KeyboardInterrupt), moment:
            link.send(6, (b"six", b"row"))
            link.answers(0.001)
        link.close()
        assert link.socket.closed
        fell += moment.fell
    assert fell > 20


def test_the_end_of_all_connections_leaves_a_socket_open_that_a_call_is_within(stood, monkeypatch):
    _, router = stood
    monkeypatch.setattr("jurybox.client.control._CLOSE", 0.1)
    wires = Wires()
    link = zmq_socket.ZmqSocket(wires.context, router.last_endpoint.decode(), None)
    first, open_within = link.socket, []

    def nested():
        wires.close()
        open_within.append(not first.closed)

    entered(link, "_send", nested)
    link.send(6, (b"six", b"row"))
    assert open_within == [True] and first.closed
    wait_until(lambda: wires.context.closed and not wires.context.held, 20, "the end of the context")


def test_all_connections_end_once_whoever_ends_them_again_meanwhile():
    """A second end at the same time would be of what libzmq has freed by then."""
    wires = Wires()
    socket, ended = wires.context.socket(zmq.DEALER), []
    close = socket.close

    def within(linger):
        ended.extend((wires.leave(done=lambda: ended.append("twice")), wires.close()))
        close(linger)

    socket.close = within
    wires.close()
    assert ended == [False, None] and wires.context.closed


def test_a_connection_that_was_opened_while_another_was_is_closed_when_it_is_replaced(stood):
    connection, _ = stood
    opens, opened = connection._open, []

    def nested(attempt):
        connection._open = opens
        connection._dial()
        opened.append(connection.link)
        return opens(attempt)

    connection._open = nested
    connection._dial()
    assert connection.link is not opened[0] and opened[0].broken and not connection.link.broken


def test_a_forked_childs_end_leaves_the_parents_connection_over_libzmq(stood):
    connection, router = stood
    if (child := os.fork()) == 0:
        connection.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    connection.link.send(5, (b"five",))
    answered(router, 5)
    assert connection.link.answers(20.0)


def test_ctrl_c_while_an_answer_is_settled_leaves_no_ticket_that_waits_for_nothing_over_tcp(stood):
    """Either its answer is still here, or the relay does not count as having the ticket."""
    connection, _ = stood
    link, fell = connection.link, 0
    for moment in each_moment((zmq_socket.__file__,), interrupt):
        link._asked[7] = None
        link._arrived[7] = 7, [b"head"]
        with contextlib.suppress(KeyboardInterrupt), moment:
            link.settled(7)
        assert link.holds(7) == bool(link._arrived)
        link._asked.clear()
        fell += moment.fell
    assert fell > 2


# ---- the transport of a lane and its connection, over a link that is scripted


class Link:
    """A link that stands, or not; it keeps what is sent, and has the answers in `there`."""

    def __init__(self, *, ready=True):
        self.ready = self.was_ready = ready
        self.broken, self.silence, self.descriptor = False, 0.0, -1
        self.sent, self.there, self.at_look, self.pings, self.waits = {}, [], [], 0, []

    @property
    def arrived(self):
        return bool(self.there)

    @property
    def unanswered(self):
        return list(self.sent)

    def send(self, number, frames):
        self.sent[number] = frames

    def exchange(self, number, frames, timeout):
        self.send(number, frames)
        self.waits.append(timeout)
        return self.there.pop()[1] if self.there else None

    def answers(self, timeout):
        self.waits.append(timeout)
        return list(self.there)

    def settled(self, number):
        self.sent.pop(number, None)
        self.there[:] = [each for each in self.there if each[0] != number]

    def holds(self, number):
        return number in self.sent

    def look(self):
        if self.at_look:
            self.at_look.pop(0)()
        return bool(self.there)

    def ping(self):
        self.pings += 1

    def close(self):
        self.broken, self.ready = True, False


@pytest.fixture
def clock(monkeypatch):
    return given(Clock(), monkeypatch, connection_module)


@pytest.fixture
def scripted():
    """A transport over a scripted link, which is replaced by others that stand."""
    connection = Connection(lambda attempt: Link())
    rows = RowsHere(SPEC, 4)
    return connection, rows, TcpTransport(connection, rows, 7)


def ticket_of(connection, sequence=5, first=1, rows=2):
    made = InFlight(sequence, first, rows, time.monotonic_ns() + 10**11, 3)
    made.engine, made.incarnation = 0, connection.incarnation
    return made


def reply_of(connection, sequence=5, code=Code.OK, outputs=(), life=None, text=b""):
    head = PREFIX + PACK_REPLY.pack(sequence, 6, connection.incarnation if life is None else life, code)
    return sequence, [head + text, *outputs]


TWO = np.arange(4, dtype=np.float32).tobytes()


def test_a_ticket_goes_out_with_its_rows_and_what_is_left_of_its_time(scripted):
    connection, rows, transport = scripted
    rows.columns.inputs["x"][1:3] = [[1, 2], [3, 4]]
    ticket = ticket_of(connection)
    transport.send(ticket)
    record, x = connection.link.sent[5]
    sequence, lease, left, *_, first, n, _, version, life = PACK_TICKET.unpack_from(bytes(record), len(PREFIX))
    assert (sequence, lease, first, n, version, life) == (5, 7, 1, 2, 3, 1)
    assert 0 < left <= 10**11 and np.frombuffer(x, np.float32).tolist() == [1, 2, 3, 4]
    ticket.deadline = 0
    transport.send(ticket)
    assert PACK_TICKET.unpack_from(bytes(connection.link.sent[5][0]), len(PREFIX))[2] == 1, "it is late, not endless"


@pytest.mark.parametrize("way", ["send", "exchange"])
def test_a_ticket_of_an_earlier_connection_is_not_sent_over_the_next(scripted, way):
    """The lane sends it again by itself, with the number of the new one."""
    connection, _, transport = scripted
    ticket = ticket_of(connection)
    connection.engines["incarnation"] += 1
    assert (transport.send(ticket) if way == "send" else transport.exchange(ticket, 1.0)) is None
    assert not connection.link.sent and not transport.holds(ticket)
    ticket.incarnation += 1
    if way == "exchange":
        connection.link.there = [reply_of(connection, outputs=[TWO])]
        assert transport.exchange(ticket, 1.0).version == 6 and not transport.holds(ticket)
    else:
        transport.send(ticket)
        assert transport.holds(ticket)


def test_an_answer_is_written_to_its_rows_alone_and_kept_until_it_is_settled(scripted):
    connection, rows, transport = scripted
    transport.send(ticket := ticket_of(connection))
    connection.link.there = [reply_of(connection, outputs=[TWO])]
    for _ in range(2):
        (answer,) = transport.receive(1.0)
        assert (answer.sequence, answer.code, answer.version) == (5, Code.OK, 6)
    assert rows.columns.outputs["y"].tolist() == [[0, 0], [0, 1], [2, 3], [0, 0]]
    rows.columns.outputs["y"][:] = 9  # it is not copied again
    transport.receive(0)
    assert (rows.columns.outputs["y"] == 9).all() and transport.holds(ticket)
    transport.settled(answer)
    assert not transport.receive(0) and not transport.holds(ticket)
    connection.link.there = [reply_of(connection, outputs=[TWO])]
    assert not transport.receive(0) and (rows.columns.outputs["y"] == 9).all(), "its rows may be another's by now"


@pytest.mark.parametrize("late", ["of another connection", "that nobody waits for"])
def test_an_answer_that_comes_too_late_is_dropped_and_its_rows_are_left_alone(scripted, late):
    connection, rows, transport = scripted
    if late == "of another connection":
        transport.send(ticket_of(connection))
        connection.link.there = [reply_of(connection, outputs=[TWO], life=2)]
    else:
        connection.link.there = [reply_of(connection, outputs=[TWO])]
    assert not transport.receive(1.0) and not connection.link.there
    assert not rows.columns.outputs["y"].any()


def test_the_rows_of_tickets_of_an_earlier_connection_are_forgotten_with_the_next_ticket(scripted):
    """A late answer must not be written to rows that are in use again."""
    connection, rows, transport = scripted
    transport.send(ticket_of(connection))
    connection.engines["incarnation"] += 1
    transport.send(ticket_of(connection, 6, 0, 1))
    connection.link.there = [reply_of(connection, 5, outputs=[TWO]), reply_of(connection, 6, outputs=[TWO[4:12]])]
    assert [answer.sequence for answer in transport.receive(1.0)] == [6]
    assert rows.columns.outputs["y"].tolist() == [[1, 2], [0, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("wrong", [[], [TWO[1:]], [TWO, b""]])
def test_an_answer_that_does_not_fit_is_an_error_once(scripted, wrong):
    connection, rows, transport = scripted
    transport.send(ticket_of(connection))
    connection.link.there = [reply_of(connection, outputs=wrong)]
    with pytest.raises(ProtocolMismatch):
        transport.receive(1.0)
    assert not transport.receive(0) and not rows.columns.outputs["y"].any()


def test_a_server_that_cannot_read_a_message_says_so_at_once_whatever_else_has_come(scripted):
    connection, _, transport = scripted
    transport.send(ticket_of(connection))
    connection.link.there = [reply_of(connection, 0, Code.PROTOCOL_MISMATCH, text=b"speak my version")]
    (answer,) = transport.receive(1.0)
    assert (answer.sequence, answer.message) == (0, "speak my version")
    transport.settled(answer)
    assert not transport.receive(0)


def test_reasons_of_failed_and_lost_rows_come_with_an_answer(scripted):
    connection, rows, transport = scripted
    for code in (Code.ROW_FAILED, Code.SESSION_LOST):
        source = RowsHere(SPEC, 4).columns
        source.fail(1, "it is odd")
        frames = row_frames.packed(source, "outputs", 0, 2, failed=True)
        frames = frames[-1:] if code == Code.SESSION_LOST else frames
        transport.send(ticket_of(connection))
        connection.link.there = [reply_of(connection, code=code, outputs=[bytes(frame) for frame in frames])]
        (answer,) = transport.receive(1.0)
        assert answer.code == code and rows.columns.failures(1, 2) == {1: "it is odd"}
        transport.settled(answer)
        rows.columns.reasons[:] = 0


def caller_of(transport, connection, memory, **more):
    x, y = memory.columns.inputs["x"][1], memory.columns.outputs["y"][1]
    place = RowPlace(1, 1, SPEC.inputs["x"], x, None, y, connection.engines, connection.incarnation, 0)
    return transport.caller(place._replace(**more))


ROW, ONE = np.array([1, 2], np.float32), np.array([3, 4], np.float32).tobytes()


def test_a_callers_row_is_sent_from_where_it_lies_and_its_outputs_are_new_arrays(scripted):
    connection, rows, transport = scripted
    call = caller_of(transport, connection, rows)
    connection.link.there = [reply_of(connection, outputs=[ONE])]
    assert call(ROW, 5, 1.0).tolist() == [3, 4] and call.version == 6
    assert connection.link.sent[5][1] is ROW and not rows.columns.outputs["y"].any()
    both = caller_of(transport, connection, rows, outputs={"y": rows.columns.outputs["y"][1]})
    connection.link.there = [reply_of(connection, outputs=[ONE])]
    assert {name: array.tolist() for name, array in both(ROW, 5, 1.0).items()} == {"y": [3, 4]}


def test_there_is_a_caller_only_for_a_row_whose_bytes_are_all_that_is_sent(scripted):
    connection, rows, transport = scripted
    for lacks in ({"input": None}, {"outputs": None}, {"rows": 2}, {"extents": np.zeros(1, np.int64)}):
        assert caller_of(transport, connection, rows, **lacks) is None


def test_a_caller_says_why_it_has_not_sent_a_row_and_leaves_it_to_the_lane(scripted):
    connection, rows, transport = scripted
    call, link = caller_of(transport, connection, rows), connection.link
    assert call(ROW.astype(np.float64), 5, 1.0) == NOT_FIT and call(None, 5, 1.0) == NOT_SENT
    link.ready = False
    assert call(ROW, 5, 1.0) == NOT_SENT
    link.ready = True
    connection.engines["state"] = EngineState.ABSENT
    assert call(ROW, 5, 1.0) == NOT_SENT
    connection.engines["state"] = EngineState.SERVING
    link.silence = IDLE  # it may be closed: it is looked at first
    link.at_look = [link.close]
    assert call(ROW, 5, 1.0) == NOT_SENT and connection.link is not link
    assert call(ROW, 5, 1.0) == NOT_SENT, "it is for the connection before"
    assert not link.sent and not connection.link.sent


def test_a_row_whose_answer_takes_longer_is_written_for_the_lane_and_its_answer_is_received(scripted):
    connection, rows, transport = scripted
    call = caller_of(transport, connection, rows)
    assert call(ROW, 5, 1.0) == NOT_ANSWERED and rows.columns.inputs["x"].tolist()[1] == [1, 2]
    connection.link.there = [reply_of(connection, outputs=[ONE])]
    (answer,) = transport.receive(1.0)
    assert answer.sequence == 5 and rows.columns.outputs["y"].tolist() == [[0, 0], [3, 4], [0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("outputs", "told"), [([], "0 outputs came, 1 were expected"), ([ONE[1:]], "output '': 7 bytes came, 8 were")]
)
def test_a_caller_refuses_outputs_that_do_not_fit(scripted, outputs, told):
    connection, rows, transport = scripted
    connection.link.there = [reply_of(connection, outputs=outputs)]
    with pytest.raises(ProtocolMismatch, match=told):
        caller_of(transport, connection, rows)(ROW, 5, 1.0)


def test_a_caller_returns_a_failures_code_and_tells_its_message(scripted):
    connection, rows, transport = scripted
    call = caller_of(transport, connection, rows)
    connection.link.there = [reply_of(connection, code=Code.MODEL_FAILED, text=b"no")]
    assert call(ROW, 5, 1.0) == Code.MODEL_FAILED and call.message() == "no"
    connection.link.there = [reply_of(connection, 0, code=Code.PROTOCOL_MISMATCH, text=b"speak my version")]
    with pytest.raises(ProtocolMismatch, match="speak my version"):
        call(ROW, 5, 1.0)


def test_a_connection_that_broke_is_made_again_at_once_and_then_twenty_times_a_second(clock):
    """Its engine is another one then, so that all that was in flight is sent again."""
    links, opened = [Link(), None, None, Link(ready=False), Link()], []
    connection = Connection(lambda attempt: opened.append(attempt) or links.pop(0))
    renewed = []
    connection.renewed = lambda: renewed.append(connection.link)
    assert connection.server_lives() and connection.incarnation == 1 and opened == [0]
    connection.link.close()
    assert connection.server_lives() and connection.incarnation == 2 and opened == [0, 0]
    assert connection.engines["state"][0] == EngineState.ABSENT
    clock.now += 0.04
    assert connection.server_lives() and opened == [0, 0]
    clock.now += 0.02
    assert connection.server_lives() and opened == [0, 0, 1], "each attempt takes the next of a host's addresses"
    assert not connection.stands()
    clock.now += 0.06
    assert connection.server_lives() and opened == [0, 0, 1, 2] and len(renewed) == 3
    waiting = connection.link
    clock.now += 4.9
    assert connection.server_lives() and not waiting.broken and connection.engines["state"][0] == EngineState.ABSENT
    clock.now += 0.2
    assert connection.server_lives() and waiting.broken, "its handshake has taken too long"
    assert connection.server_lives() and connection.link.ready and connection.incarnation == 2
    assert connection.server_lives() and connection.engines["state"][0] == EngineState.SERVING


def test_a_server_is_gone_ten_seconds_after_its_connection_was_lost(clock):
    links = [Link()]
    connection = Connection(lambda attempt: links.pop() if links else None)
    assert connection.server_lives()
    clock.now += 1000
    connection.link.close()
    assert connection.server_lives()
    clock.now += 9.9
    assert connection.server_lives()
    clock.now += 0.2
    assert not connection.server_lives()


def test_tickets_sent_before_the_first_connection_stood_are_sent_again_over_the_next(clock):
    links = [None, Link()]
    connection = Connection(lambda attempt: links.pop(0))
    assert connection.engines["state"][0] == EngineState.SERVING and connection.incarnation == 1
    clock.now += 0.1
    assert connection.server_lives() and connection.incarnation == 2 and connection.link.ready


def test_a_server_that_answers_no_ping_is_connected_to_again(clock):
    connection = Connection(lambda attempt: Link())
    link = connection.link
    link.silence = 100.0
    assert connection.server_lives() and not link.pings, "nothing is awaited of it"
    link.send(5, ())
    for _ in range(2):
        assert connection.server_lives() and link.pings == 1
    clock.now += 9.9
    link.silence = 1.9
    assert connection.server_lives()
    link.silence = 2.0
    assert connection.server_lives() and link.pings == 2, "it has shown a sign of life since"
    clock.now += 10.0
    assert connection.server_lives() and connection.link is link
    clock.now += 0.1
    assert connection.server_lives() and link.broken and connection.link is not link and connection.incarnation == 2


def test_a_connection_is_looked_at_before_it_is_used_only_if_it_was_idle():
    connection = Connection(lambda attempt: Link())
    link = connection.link
    link.at_look = [link.close]
    link.silence = IDLE - 0.1
    assert connection.stands() and not link.broken
    link.silence = IDLE
    assert connection.stands() and link.broken and connection.link is not link and connection.incarnation == 2
    connection.link.silence = IDLE
    connection.link.there = [reply_of(connection)]
    assert connection.stands(), "an answer is there: it stands"


def test_a_ticket_after_an_idle_time_goes_over_the_connection_that_replaces_a_closed_one(scripted):
    connection, _, transport = scripted
    link, ticket = connection.link, ticket_of(connection)
    link.silence, link.at_look = IDLE, [link.close]
    transport.send(ticket)
    assert connection.link is not link and ticket.incarnation == connection.incarnation == 2
    assert transport.holds(ticket) and list(connection.link.sent) == [5] and not link.sent


def test_whoever_waits_without_a_connection_sleeps_a_little(monkeypatch):
    slept = []
    monkeypatch.setattr("jurybox.client.remote.tcp.time", SimpleNamespace(sleep=slept.append))
    transport = TcpTransport(Connection(lambda attempt: None), RowsHere(SPEC, 1), 7)
    assert transport.receive(0.01) == transport.receive(9.0) == []
    assert slept == [0.01, 0.02]


def test_an_event_loop_leaves_the_loop_before_it(scripted):
    connection, _, transport = scripted
    connection.link.descriptor, connection.link.watched = 9, lambda on: None
    first, second = Loop(lambda: None), Loop(lambda: None)
    transport.watch(first, lambda: None)
    transport.watch(first, lambda: None)
    assert first.watched == {9}
    transport.watch(second, lambda: None)
    assert not first.watched and second.watched == {9}
    transport.close()
    assert not second.watched and connection.link.broken


def test_whoever_has_an_answer_waits_for_no_other(scripted):
    connection, _, transport = scripted
    transport.send(ticket_of(connection))
    assert not transport.receive(9.0)
    connection.link.there = [reply_of(connection, outputs=[TWO])]
    assert len(transport.receive(9.0)) == len(transport.receive(9.0)) == 1
    assert connection.link.waits == [9.0, 9.0, 0]


def test_an_answer_that_was_read_outlives_its_connection(scripted, monkeypatch):
    slept = []
    connection, _, transport = scripted
    transport.send(ticket := ticket_of(connection))
    monkeypatch.setattr("jurybox.client.remote.tcp.time", SimpleNamespace(sleep=slept.append))
    connection.link.there = [reply_of(connection, outputs=[TWO])]
    (answer,) = transport.receive(0)
    transport.forked()
    assert transport.receive(9.0) == [answer] and transport.holds(ticket) and not slept
    transport.settled(answer)
    assert not transport.receive(9.0) and not transport.holds(ticket) and slept == [0.02]


def test_a_broken_link_is_read_as_long_as_answers_are_there(scripted):
    connection, rows, transport = scripted
    transport.send(ticket_of(connection))
    connection.link.there = [reply_of(connection, outputs=[TWO])]
    connection.link.broken = True
    connection.mend = lambda: None
    assert [answer.sequence for answer in transport.receive(9.0)] == [5] and rows.columns.outputs["y"].any()


@pytest.mark.parametrize("way", ["exchange", "caller"])
def test_a_call_waits_as_long_as_it_was_told_and_a_caller_a_tenth_of_a_second_at_most(scripted, way):
    connection, rows, transport = scripted
    call = caller_of(transport, connection, rows)
    for seconds in (0.05, 30.0):
        before = time.monotonic_ns()
        if way == "caller":
            assert call(ROW, 5, seconds) == NOT_ANSWERED
            assert before + seconds * 1e9 <= call.deadline <= time.monotonic_ns() + seconds * 1e9
            left = PACK_TICKET.unpack_from(bytes(connection.link.sent[5][0]), len(PREFIX))[2]
            assert left == int(seconds * 1e9) and connection.link.waits[-1] == min(seconds, 0.1)
        else:
            assert transport.exchange(ticket_of(connection), seconds) is None
            assert 0 <= connection.link.waits[-1] <= seconds and connection.link.waits[-1] > 0.1 * (seconds > 1)
    assert call(ROW, 5, 0.0) == NOT_ANSWERED
    assert PACK_TICKET.unpack_from(bytes(connection.link.sent[5][0]), len(PREFIX))[2] == 1, "it is late, not endless"


def test_a_call_within_the_copying_of_an_answer_leaves_it_to_the_call_that_copies(scripted, monkeypatch):
    connection, rows, transport = scripted
    transport.send(ticket := ticket_of(connection))
    connection.link.there = [reply_of(connection, outputs=[TWO])]
    unpack, within = row_frames.unpack, []

    def nested(*arguments, **options):
        within.append((list(transport.receive(0)), transport.is_reading(ticket), len(connection.link.there)))
        within.append(transport._read(reply_of(connection, outputs=[TWO])[1]))
        return unpack(*arguments, **options)

    monkeypatch.setattr(row_frames, "unpack", nested)
    assert not transport.is_reading(ticket)
    assert [answer.sequence for answer in transport.receive(0)] == [5]
    assert within == [([], True, 1), None] and not transport.is_reading(ticket) and rows.columns.outputs["y"].any()


def test_a_loop_looks_for_answers_whenever_a_ticket_was_sent_over_libzmq(stood):
    """The signal of a socket's descriptor is that of a change: sending has cleared it."""
    connection, _ = stood
    transport, loop, called = TcpTransport(connection, RowsHere(SPEC, 4), 7), Loop(lambda: None), []
    loop.call_soon = called.append
    transport.send(ticket_of(connection))
    assert not called
    transport.watch(loop, (arrived := lambda: None))
    transport.send(ticket_of(connection, 6))
    transport.exchange(ticket_of(connection, 7), 0.0)
    assert called == [arrived, arrived]
    loop.is_closed = lambda: True
    transport.send(ticket_of(connection, 8))
    assert len(called) == 2
    assert caller_of(transport, connection, RowsHere(SPEC, 4)) is None
