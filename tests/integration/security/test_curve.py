"""Security of the tcp transport: only known keys connect, and clients with such a key have limited rights."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zmq
import zmq.auth
from tests.serving import serving, wait_until

from jurybox.client import Busy, Refused, ServerGone, SpecMismatch, connect
from jurybox.client.remote.keys import keys
from jurybox.client.transports.zmq_socket import open_socket
from jurybox.protocol import wire
from jurybox.protocol.control_pb2 import ControlReply, ControlRequest, LeaseRequest, LoadRequest, ReleaseRequest
from jurybox.protocol.errors import Code
from jurybox.server.security.access import make_pair
from jurybox.server.security.limits import most_held

MIB = 1 << 20
MODELS = {"affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 64}}
X = np.ones((2, 4), np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    make_pair(folder / "server")
    make_pair(folder / "friend")
    make_pair(folder / "stranger")
    (folder / "clients").mkdir()
    (folder / "friend.key").rename(folder / "clients" / "friend.key")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory, folder):
    security = {
        "curve_key": str(folder / "server.key_secret"),
        "curve_clients": str(folder / "clients"),
        "max_message_mib": 1,
    }
    with serving(tmp_path_factory.mktemp("server"), MODELS, tcp="127.0.0.1:0", **security) as running:
        running.url = f"tcp://{running.listening('tcp')}"
        yield running


@pytest.fixture
def friend(folder):
    return {"server_key": str(folder / "server.key"), "client_key": str(folder / "friend.key_secret")}


def test_a_client_with_a_known_key_connects(server, friend):
    with connect(server.url, **friend) as client:
        np.testing.assert_array_equal(client.model("affine").infer(X), 2 * X + 1)


def test_keys_come_from_the_environment_too_and_the_servers_may_be_text(server, folder, monkeypatch):
    public, _ = zmq.auth.load_certificate(folder / "server.key")
    monkeypatch.setenv("JURYBOX_SERVER_KEY", public.decode())
    monkeypatch.setenv("JURYBOX_CLIENT_KEY", str(folder / "friend.key_secret"))
    monkeypatch.setenv("JURYBOX_ADDRESS", server.url)
    with connect() as client:
        assert client.models() == ["affine"]


def test_nobody_else_does(server, folder):
    for wrong in (
        {},  # no encryption
        {"server_key": str(folder / "server.key")},  # a generated client key
        {"server_key": str(folder / "server.key"), "client_key": str(folder / "stranger.key_secret")},
        {"server_key": str(folder / "stranger.key"), "client_key": str(folder / "friend.key_secret")},
    ):
        with pytest.raises(ServerGone, match="with these keys|without keys"):
            connect(server.url, timeout=0.4, **wrong)
    assert server.process.poll() is None


def test_invalid_keys_are_named(folder, tmp_path):
    for server_key, client_key, message in (
        ("nothing", None, "is no key"),
        (str(folder / "server.key"), str(folder / "stranger.key"), "public key alone"),
        (None, str(folder / "friend.key_secret"), "without the server's key"),
    ):
        with pytest.raises(Refused, match=message):
            keys(server_key, client_key)
    assert b"secret" not in repr(keys(str(folder / "server.key"), None)).encode()


@pytest.fixture
def raw(server, friend):
    """Raw sockets with the friend's key."""
    context, sockets = zmq.Context(), []

    def open_one(identity=b"Rsomebody"):
        socket = open_socket(context, server.url, keys(**friend), identity)
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        sockets.append(socket)
        return socket

    yield open_one
    for socket in sockets:
        socket.close()
    context.term()


def call(socket, **request):
    socket.send_multipart((wire.PREFIX, b"12345678", ControlRequest(**request).SerializeToString()))
    while True:
        frames = socket.recv_multipart()
        if frames[1] == b"12345678":  # not a probe
            return ControlReply.FromString(frames[2])


def ask(socket, record, *tensors):
    socket.send_multipart((wire.PREFIX + wire.PACK_TICKET.pack(*record), *tensors))
    head = socket.recv_multipart()[0]
    _, _, _, code = wire.PACK_REPLY.unpack_from(head, 2)
    return code, head[2 + wire.PACK_REPLY.size :].decode()


def test_tickets_that_do_not_fit_their_lane_are_refused_with_the_reason(raw):
    control = raw()
    lease = call(control, lease=LeaseRequest(model="affine", rows=4)).lease
    row = bytes(16)

    def ticket(first, rows, number=lease.lease, sequence=7):
        return (sequence, number, 10**9, 0, 0, first, rows, 0, 0, 1)

    for record, tensors, code in (
        (ticket(0, 5), [row * 5], Code.REFUSED),
        (ticket(3, 2), [row * 2], Code.REFUSED),
        (ticket(2**32 - 1, 2), [row * 2], Code.REFUSED),
        (ticket(0, 0), [b""], Code.REFUSED),
        (ticket(0, 1), [], Code.SPEC_MISMATCH),
        (ticket(0, 1), [row, row], Code.SPEC_MISMATCH),
        (ticket(0, 1), [row[:-1]], Code.SPEC_MISMATCH),
        (ticket(0, 1, number=1), [row], Code.STALE_LEASE),
        (ticket(0, 1), [row], Code.OK),
    ):
        got, reason = ask(control, record, *tensors)
        assert got == code, reason
    call(control, release=ReleaseRequest(lease=lease.lease))


def test_no_client_can_return_anothers_lane(raw, server):
    one, other = raw(b"Rone"), raw(b"Rother")
    lease = call(one, lease=LeaseRequest(model="affine", rows=4)).lease
    call(other, release=ReleaseRequest(lease=lease.lease))
    with server.connect() as client:
        # Lanes of this file's earlier clients may not be released yet; without this one's lane, 0 rows would remain.
        wait_until(lambda: client.status()["lanes"]["rows"] <= 4, 30, "the release of lanes of closed clients")
        assert client.status()["lanes"]["rows"] == 4
    call(one, release=ReleaseRequest(lease=lease.lease))


def test_settings_that_name_code_are_not_taken_from_a_network(server, friend, raw):
    request = LoadRequest(model="affine", settings_json='{"factory": "os:getcwd"}')
    assert call(raw(), load=request).error.code == Code.REFUSED
    with connect(server.url, **friend) as client:
        with pytest.raises(Refused, match="this server's own, and its settings are not taken from a network"):
            client.load("affine", {"factory": "os:getcwd"})
        with pytest.raises(Refused, match=r'remote_factories = \["os:\*"\]'):
            client.load("other", {"factory": "os:getcwd"}, keep=5.0)
        client.load("affine")  # as configured


def test_a_message_beyond_the_limit_ends_its_connection_and_nothing_else(server, friend, raw):
    socket = raw()
    socket.send_multipart((wire.PREFIX, b"12345678", bytes(2 << 20)))
    assert not socket.poll(1000)
    with connect(server.url, **friend) as client:
        np.testing.assert_array_equal(client.model("affine").infer(X), 2 * X + 1)


# In a process of its own, which libzmq may end, too.
PARTS = """
import json, sys, time, zmq
from jurybox.client.remote.keys import keys
from jurybox.client.transports.zmq_socket import open_socket
socket = open_socket(zmq.Context(), sys.argv[1], keys(**json.loads(sys.argv[2])), b"Rparts")
for _ in range(200):
    socket.send(bytes(900_000), zmq.SNDMORE)
socket.send(b"")
time.sleep(600)
"""


def test_a_message_of_any_number_of_parts_takes_no_more_memory_than_the_relay_may_have(server, friend):
    status = Path(f"/proc/{server.pids()['relay']}/status")

    def kib(field):
        """Of the relay, or None if it has ended: until its parent has noticed, its status is there without memory."""
        try:
            found = re.search(rf"^{field}:\s+(\d+) kB", status.read_text(), re.MULTILINE)
        except (FileNotFoundError, ProcessLookupError):
            return None
        return int(found[1]) if found else None

    def arrived():
        highest = kib("VmHWM")
        return highest is None or highest - before > 60 << 10

    before = kib("VmRSS")
    most = resource.prlimit(server.pids()["relay"], resource.RLIMIT_DATA)[0] >> 10
    with subprocess.Popen([sys.executable, "-c", PARTS, server.url, json.dumps(friend)]) as sender:
        try:
            wait_until(arrived, 60, "it arrives")
            with connect(server.url, timeout=60, **friend) as client:
                np.testing.assert_array_equal(client.model("affine").infer(X), 2 * X + 1)
        finally:
            sender.kill()
    # libzmq has ended the connection; it may also end the process, which is restarted.
    if (highest := kib("VmHWM")) is not None:
        assert highest - before < (most_held(MIB) + (64 << 20)) >> 10
    # So is a relay that has no memory left for a thread; the next tests' lanes must not end with it.
    wait_until(lambda: (taken := kib("VmData")) is None or taken + (16 << 10) <= most, 60, "room, or the end")


def test_rows_of_remote_clients_are_counted(server, friend):
    with connect(server.url, **friend) as client:
        model = client.model("affine", rows=60)
        with pytest.raises(Busy, match="rows are leased"):
            client.model("affine", rows=10, timeout=1.0)
        model.close()
        client.model("affine", rows=60, timeout=30).close()


def test_the_weights_channel_stays_on_its_host(server, friend):
    with connect(server.url, **friend) as client:
        for take in (client.weights, client.publisher):
            with pytest.raises(Refused):
                take("affine")
        with pytest.raises(SpecMismatch):
            client.model("affine").infer(np.ones((2, 5), np.float32))
