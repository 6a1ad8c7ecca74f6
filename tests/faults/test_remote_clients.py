"""Clients of other hosts: what happens to them, and to the server's rows, when something dies."""

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import zmq
from tests.faults.conftest import MODELS, leaving_nothing
from tests.serving import segments, serving, unread, wait_until

from jurybox.client import Refused, ServerGone, connect
from jurybox.client.local_link import LocalLink
from jurybox.protocol.control_pb2 import ControlReply, ControlRequest, LeaseRequest
from jurybox.protocol.segment import sweep
from jurybox.protocol.wire import PREFIX
from jurybox.server.relay.relay import Relay
from jurybox.server.relay.zmq_listener import ZmqListener
from jurybox.server.relay.zmtp_listener import ZmtpListener

X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for all: it survives whatever happens to its parts."""
    before, open_to = segments(), {"tcp": "127.0.0.1:0", "grpc": "127.0.0.1:0"}
    with leaving_nothing(), serving(tmp_path_factory.mktemp("server"), MODELS, **open_to) as running:
        running.before = before
        yield running


@pytest.fixture
def nothing_is_left(server):
    """What a test that failed has left is not the next one's."""
    wait_until(lambda: leased(server) == 0, 30, "the rows of the test before came back")


@pytest.fixture
def where(server):
    return f"tcp://{server.listening('tcp')}"


def leased(server):
    with server.connect() as client:
        return client.status()["lanes"]["rows"]


def connected(where):
    """Whether this process has a connection to the relay."""
    port = int(where.rsplit(":", 1)[1])
    return any(
        one.status == psutil.CONN_ESTABLISHED and one.raddr and one.raddr.port == port
        for one in psutil.Process().net_connections("tcp")
    )


def taken(server, where):
    """How many connections the relay has on its port."""
    port = int(where.rsplit(":", 1)[1])
    connections = psutil.Process(server.pids()["relay"]).net_connections("tcp")
    return sum(one.status != psutil.CONN_LISTEN and one.laddr.port == port for one in connections)


def test_the_rows_of_a_killed_remote_client_are_returned(server, where):
    code = (
        "import sys, time\nfrom jurybox.client import connect\n"
        f"client = connect({where!r})\nmodel = client.model('affine', rows=40)\nprint('here', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "here\n"
        assert leased(server) == 40
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: leased(server) == 0, 20, "the rows came back")


def test_an_idle_remote_client_keeps_its_rows(server, where):
    with connect(where) as client:
        model = client.model("affine", rows=40)
        time.sleep(2.5)  # two looks of the relay at whether it is there
        assert leased(server) == 40
        np.testing.assert_array_equal(model.infer(X), 2 * X + 1)
    wait_until(lambda: leased(server) == 0, 20, "the rows came back")


def test_a_killed_relay_is_restarted_remote_clients_reconnect_and_local_ones_are_not_affected(server, where):
    local = server.connect()
    remote = connect(where)
    here, there = local.model("affine"), remote.model("affine", rows=4)
    np.testing.assert_array_equal(there.infer(X), 2 * X + 1)
    noticed, stop = [], threading.Event()

    def go_on():
        try:
            while not stop.is_set():
                np.testing.assert_array_equal(here.infer(X, timeout=20), 2 * X + 1)
        except Exception as error:  # noqa: BLE001
            noticed.append(error)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        os.kill(server.pids()["relay"], signal.SIGKILL)
        np.testing.assert_array_equal(there.infer(X, timeout=30), 2 * X + 1)  # on a new lease, by itself
    finally:
        stop.set()
        thread.join()
    assert not noticed
    remote.close()
    local.close()
    wait_until(lambda: leased(server) == 0, 20, "the rows of the dead relay came back")


@pytest.mark.usefixtures("nothing_is_left")
def test_a_lease_that_was_lost_with_its_relay_is_requested_again(server, where):
    """Only the broken connection shows that the request is lost: it must not wait for its whole time-out."""
    pids = server.pids()
    with connect(where, timeout=50) as client, ThreadPoolExecutor(1) as pool:
        os.kill(pids["supervisor"], signal.SIGSTOP)
        try:
            asked = pool.submit(client.model, "affine", rows=4)
            wait_until(lambda: b"affine" in unread(pids["supervisor"]), 40, "the relay has passed it on")
            os.kill(pids["relay"], signal.SIGKILL)
        finally:
            os.kill(pids["supervisor"], signal.SIGCONT)
        model = asked.result(60)
        np.testing.assert_array_equal(model.infer(X, timeout=30), 2 * X + 1)
        wait_until(lambda: leased(server) == 4, 20, "one lease, and none of the dead relay's")
    wait_until(lambda: leased(server) == 0, 20, "the rows came back")


@pytest.mark.usefixtures("nothing_is_left")
def test_a_relay_that_was_replaced_long_ago_causes_no_second_lease(server, where):
    pids = server.pids()
    with connect(where, timeout=50) as client, ThreadPoolExecutor(1) as pool:
        client.status()
        os.kill(pids["relay"], signal.SIGKILL)
        wait_until(lambda: server.pids().get("relay", pids["relay"]) != pids["relay"], 60, "another relay")
        with connect(where, timeout=50) as another:
            another.status()
        wait_until(lambda: connected(where), 20, "the connection has come up again by itself")
        os.kill(pids["supervisor"], signal.SIGSTOP)
        try:
            asked = pool.submit(client.model, "affine", rows=4)
            wait_until(lambda: b"affine" in unread(pids["supervisor"]), 40, "the relay has passed it on")
        finally:
            os.kill(pids["supervisor"], signal.SIGCONT)
        np.testing.assert_array_equal(asked.result(60).infer(X, timeout=30), 2 * X + 1)
        client.status()  # answered behind a second request, if there was one
        wait_until(lambda: leased(server) == 4, 20, "one lease")
    wait_until(lambda: leased(server) == 0, 20, "the rows came back")


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("answered", [True, False])
def test_a_lease_requested_again_over_another_connection_is_the_same(server, where, answered):
    """The answer was lost with the first connection; its lane would be unused for as long as the client lives."""
    context, pids = zmq.Context(), server.pids()

    def ask():
        one = context.socket(zmq.DEALER)
        for name, value in {"LINGER": 0, "RCVTIMEO": 20_000, "IDENTITY": b"Rasks again"}.items():
            one.setsockopt(getattr(zmq, name), value)
        one.connect(where)
        request = ControlRequest(lease=LeaseRequest(model="affine", rows=4))
        one.send_multipart((PREFIX, b"the call", request.SerializeToString()))
        return one

    def answer(one):
        while True:
            _, number, body = one.recv_multipart()
            if number == b"the call":  # not a probe
                return ControlReply.FromString(body).lease.lease

    try:
        if not answered:
            os.kill(pids["supervisor"], signal.SIGSTOP)
        with ask() as first:
            if answered:
                answer(first)
            else:
                wait_until(lambda: b"affine" in unread(pids["supervisor"]), 40, "the relay has passed it on")
        wait_until(lambda: not taken(server, where), 20, "the relay has seen the connection end")
        with ask() as second:
            os.kill(pids["supervisor"], signal.SIGCONT)
            assert answer(second)
            wait_until(lambda: leased(server) == 4, 20, "one lease")
    finally:
        os.kill(pids["supervisor"], signal.SIGCONT)
        context.destroy(linger=0)
    wait_until(lambda: leased(server) == 0, 20, "the rows came back")


def test_a_lease_that_arrives_too_late_is_returned(server, where):
    """Its caller has given up; the relay would hold it for as long as that client lives."""
    with connect(where, timeout=50) as client:
        client.status()
        supervisor = server.pids()["supervisor"]
        os.kill(supervisor, signal.SIGSTOP)
        try:
            with pytest.raises(ServerGone):
                client._link.lease("affine", 4, 0.5)
            wait_until(lambda: connected(where), 20, "the connection that is made anew then")
        finally:
            os.kill(supervisor, signal.SIGCONT)
        client.status()  # answered behind the lease, which has been granted then
        wait_until(lambda: client.status() and leased(server) == 0, 20, "the rows came back")


def test_a_killed_engine_is_nothing_to_a_remote_client_but_a_wait(server, where):
    with connect(where) as client:
        model = client.model("affine", rows=4)
        model.infer(X)
        os.kill(server.pids()["engine-0"], signal.SIGKILL)
        np.testing.assert_array_equal(model.infer(X, timeout=60), 2 * X + 1)


def test_rows_lost_with_a_connection_are_refused_until_taken_again(server, where):
    with connect(where) as client:
        model = client.model("affine", rows=4)
        with model.rows(2) as held:
            held.inputs["observation"][:] = X
            held.infer()
            os.kill(server.pids()["relay"], signal.SIGKILL)
            with pytest.raises((Refused, ServerGone), match="not held|no longer yours|in flight"):
                held.infer(timeout=30)
                held.infer(timeout=30)
        np.testing.assert_array_equal(model.infer(X, timeout=30), 2 * X + 1)


def test_a_killed_gateway_is_nothing_to_a_client_over_grpc_but_a_wait(server):
    with connect(f"grpc://{server.listening('grpc')}", timeout=30) as client:
        model = client.model("affine", rows=4)
        np.testing.assert_array_equal(model.infer(X), 2 * X + 1)
        os.kill(server.pids()["gateway"], signal.SIGKILL)
        until = time.monotonic() + 30
        while True:  # on a busy machine it may take longer than a call tries again by itself
            try:
                np.testing.assert_array_equal(model.infer(X, timeout=20), 2 * X + 1)
                break
            except ServerGone:
                assert time.monotonic() < until


@pytest.mark.parametrize("openly", [True, False])
def test_no_answer_is_lost_to_the_relays_looks_at_its_tickets(server, openly):
    """A relay that looks after its tickets without a break: whenever an answer comes, it is looking."""
    asking = threading.Event()
    asking.set()

    async def relaying(where):
        context = zmq.Context()
        front = (
            ZmtpListener("127.0.0.1:0", 1 << 20) if openly else ZmqListener(context, "127.0.0.1:0", None, None, 1 << 20)
        )
        back = context.socket(zmq.DEALER)
        back.connect(server.address)
        link = await asyncio.to_thread(LocalLink, server.address, "shm", 20.0)
        relay = Relay(front, back, link, lambda *_, **__: None)
        where.put(f"tcp://{front.bound}")
        while asking.is_set():
            relay.look_after()
            await asyncio.sleep(0)
        relay.end()
        link.close()
        front.close()
        context.destroy(linger=0)

    where = queue.Queue()
    thread = threading.Thread(target=lambda: asyncio.run(relaying(where)))
    thread.start()
    try:
        with connect(where.get(timeout=20), timeout=10) as client:
            model = client.model("affine", rows=2)
            for _ in range(150):
                np.testing.assert_array_equal(model.infer(X), 2 * X + 1)
    finally:
        asking.clear()
        thread.join(20)


def test_remote_clients_get_an_error_for_a_killed_server(server, where, monkeypatch):
    """The last, since it ends the server of all."""
    monkeypatch.setattr("jurybox.client.remote.connection._TIMEOUT", 1.0)
    client = connect(where)
    model = client.model("moody", rows=4)
    ticket = model.submit(np.full((1, 4), 30_000_000, np.float32))
    os.killpg(server.process.pid, signal.SIGKILL)
    with pytest.raises(ServerGone, match="1 tickets of 'moody' in flight"):
        ticket.result(timeout=60)
    client.close()
    # The server's files are removed only when the last of its killed threads has released them.
    wait_until(lambda: (sweep(), segments() <= server.before)[1], 30, "shared memory as it was before")
