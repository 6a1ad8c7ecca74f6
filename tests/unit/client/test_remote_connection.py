"""The state of a connection to a tcp:// server is known at every moment."""

import contextlib
import os
import socket
import time

import numpy as np
import pytest
import zmq
from tests.moments import each_moment
from tests.serving import wait_until

from jurybox.client import ServerGone, connect
from jurybox.client.control import Wires
from jurybox.client.link import RowsHere
from jurybox.client.remote.connection import Connection
from jurybox.client.remote.tcp import SentRows, TcpTransport
from jurybox.client.transports import zmq_socket
from jurybox.protocol.errors import Code
from jurybox.protocol.scoreboard import EngineState
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.protocol.wire import PACK_REPLY, PREFIX

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
    assert [number for number, _ in link.answers(0)] == [5]
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
        link._arrived[:] = [(7, [b"head"])]
        with contextlib.suppress(KeyboardInterrupt), moment:
            link.settled(7)
        assert link.holds(7) == bool(link._arrived)
        link._asked.clear()
        fell += moment.fell
    assert fell > 3
