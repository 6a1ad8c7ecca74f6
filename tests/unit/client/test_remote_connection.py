"""The state of a connection to a tcp:// server is known at every moment."""

import socket
import time

import pytest
import zmq
from tests.serving import wait_until

from jurybox.client import ServerGone, connect
from jurybox.client.remote.connection import Connection


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
        connection = Connection(context, f"tcp://127.0.0.1:{silent.getsockname()[1]}", None)
        assert connection.server_lives(), "it may still come"
        wait_until(lambda: not connection.server_lives(), 20, "it was waited for long enough")
        connection.close()


def test_an_idle_connection_stays_open(context, impatient):
    router = context.socket(zmq.ROUTER)
    connection = Connection(context, "tcp://127.0.0.1:{}".format(router.bind_to_random_port("tcp://127.0.0.1")), None)
    connection.socket.send(b"hello")
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
