"""Requests on a fast path beside the same on the general path: both accept or both refuse, alike.

Over HTTP a head that was seen before is not parsed again: neither for tensors or JSON nor for a dialect. One more field
makes a head new, so the same request with it is the general path's. Over ``tcp://`` native code takes the tickets of a
connection from the second on; the first one of a new connection is Python's. `test_known_forms_fuzz.py` does the same
with the messages of gRPC and the bodies of HTTP. Together they send 2,000 requests, and 100,000 in `make fuzz`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import threading
from random import Random

import numpy as np
import zmq
from tests.fuzz.cases import cases
from tests.unit.server.test_known_paths import Gateway

from jurybox.protocol import wire
from jurybox.protocol.control_pb2 import ControlReply, ControlRequest, LeaseRequest, ReleaseRequest
from jurybox.protocol.errors import Code

# ---- heads of HTTP

FIELDS = [
    b"Host: localhost", b"host: LOCALHOST:1", b"Host: evil.example", b"Accept: */*", b"Connection: keep-alive",
    b"Connection: Keep-Alive", b"Connection: close", b"Content-Encoding: identity", b"Content-Encoding: gzip",
    b"Content-Type: application/json", b"Content-Type: text/x", b"Origin: http://localhost", b"Origin: http://evil",
    b"Transfer-Encoding: chunked", b"Expect: 100-continue", b"Upgrade: h2c", b"Authorization: Bearer x", b"A:b",
    b"X-Long: " + b"x" * 900, b"Trailer: A", b"Content-Length: 5", b"Inference-Header-Content-Length: 5", b"Host:",
]  # fmt: skip
ONCE = itertools.count()
OPEN = "the server waits for more"  # for bytes of a body whose length was bent, for example


def head(random, line, length, fields):
    """Return the head of a request in two parts, between which another field may stand; None if it ends too early."""
    given = [*fields, b"Content-Length: %d" % (length + random.choice([0] * 30 + [1, -1, 7]))]
    if random.random() < 0.9:
        given.append(b"Host: localhost")
    given += random.choices(FIELDS, k=random.choice([0, 0, 0, 1, 2]))
    random.shuffle(given)
    made = bytearray(line + b"\r\n" + b"\r\n".join(given))
    for _ in range(random.choice([0, 0, 0, 0, 1, 1, 2])):
        at = random.randrange(len(made))
        match random.randrange(4):
            case 0:
                made[at] = random.choice(b'0123456789,:;/ aetHx\\\x00\xff\t"')
            case 1:
                made[at:at] = random.choice([b" ", b"\t", b"\r", b"x", b"0", b"/", b"%2F"])
            case 2:
                del made[at]
            case _:
                made[at] ^= 32
    return None if b"\n\r\n" in made or b"\n\n" in made or made.endswith((b"\r", b"\n")) else bytes(made)


def exchanged(port, *pieces, patience=1.0):
    """Send bytes, and return all answers until the server closes: status, the fields that count, and content.

    OPEN is the last of them if nothing comes for `patience` seconds.
    """
    closed = True
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            for piece in pieces:
                connection.sendall(piece)
        received = b""
        connection.settimeout(patience)
        try:
            while more := connection.recv(1 << 16):
                received += more
        except TimeoutError:
            closed = False
        except ConnectionResetError:
            pass
    answers = []
    while received:
        top, _, received = received.partition(b"\r\n\r\n")
        line, *fields = top.split(b"\r\n")
        named = {name.lower(): value for name, _, value in (field.partition(b": ") for field in fields)}
        size = int(named.get(b"content-length", 0))
        counted = {name: named.get(name) for name in (b"content-type", b"inference-header-content-length")}
        answers.append((line.split()[1], counted, received[:size]))
        received = received[size:]
    return answers if closed else [*answers, OPEN]


def compare(random, count, port, line, fields, body, behind):
    """Send `count` requests with heads bent at random; return how many were accepted."""
    accepted = 0
    for _ in range(count):
        made = None
        while made is None:
            made = head(random, line, len(body), fields)
        known = made + b"\r\n\r\n" + body + behind
        cut = random.randrange(len(known)) if random.random() < 0.3 else len(known)
        once = b"\r\nX-Once: %d" % next(ONCE)
        expected = exchanged(port, made + once + b"\r\n\r\n" + body + behind)
        for _ in range(3):  # the first may teach the head, the others use it
            found = exchanged(port, known[:cut], known[cut:])
            if found != expected and OPEN in (*found, *expected):  # only one of them was slow, or waits
                expected = exchanged(port, made + once + b"\r\n\r\n" + body + behind, patience=20.0)
                found = exchanged(port, known[:cut], known[cut:], patience=20.0)
            assert found == expected, known
        accepted += bool(expected) and expected[0][0] == b"200"
    return accepted


@cases(170, 10_000)
def test_a_known_head_of_a_request_with_tensors_is_read_as_one_read_in_full(server, count, seed):
    random, port = Random(seed), int(server.told["http"].rsplit(":", 1)[1])
    rows = np.arange(4, dtype=np.float32).tobytes()
    tensor = {"name": "observation", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    line = b"POST /v2/models/affine/infer HTTP/1.1"
    behind = line + b"\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
    fields = [b"Inference-Header-Content-Length: %d" % len(text)]
    accepted = compare(random, count, port, line, fields, text + rows, behind)
    assert accepted > count / 10


def body_of(random):
    """A request in JSON, or what resembles one."""
    data = [
        random.choice([0, 1.5, -2, 1e39, True, None, "1"] if random.random() < 0.2 else [0, 1.5, -2]) for _ in range(4)
    ]
    tensor = {"name": "observation", "datatype": "FP32", "shape": [1, 4], "data": data}
    match random.randrange(12):
        case 0:
            tensor["name"] = random.choice(["observations", "", 5])
        case 1:
            tensor["shape"] = random.choice([[4], [2, 2], [1, 4, 1], [-1, 4], [1.0, 4]])
        case 2:
            tensor["datatype"] = random.choice(["FP64", "INT32", "BYTES", "fp32"])
        case 3:
            tensor["parameters"] = random.choice([{"binary_data_size": 16}, {"x": 1}, {}])
    request = {"inputs": [tensor]}
    match random.randrange(10):
        case 0:
            request["parameters"] = {"binary_data_output": True}
        case 1:
            request["parameters"] = {"sequence_id": 7, "sequence_start": True}
        case 2:
            request["parameters"] = random.choice(
                [{"timeout": 1}, {"row_errors": True}, {"unknown": 1}, {"priority": 1}]
            )
        case 3:
            request["outputs"] = [
                random.choice(
                    [{"name": "action"}, {"name": "x"}, {"name": "action", "parameters": {"binary_data": True}}]
                )
            ]
        case 4:
            request["id"] = random.choice(["abc", "\ud800", 7])
    text = json.dumps(request)
    return (text[: random.randrange(len(text))] if random.random() < 0.05 else text).encode()


@cases(180, 10_000)
def test_a_known_head_of_a_request_in_json_is_read_as_one_read_in_full(server, count, seed):
    random, port = Random(seed), int(server.told["http"].rsplit(":", 1)[1])
    line = b"POST /v2/models/affine/infer HTTP/1.1"
    behind = line + b"\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
    accepted = sum(compare(random, 6, port, line, [], body_of(random), behind) for _ in range(count // 6))
    assert accepted > count / 20


@cases(220, 10_000)
def test_a_known_head_of_a_dialects_request_is_read_as_one_read_in_full(count, seed):
    loop, told = asyncio.new_event_loop(), threading.Event()
    ports, over = [], asyncio.Event()

    async def serve():
        async with Gateway().listening() as gateway:
            ports.append(gateway.port)
            told.set()
            await over.wait()
            assert gateway.held == 0

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert told.wait(20)
    try:
        line = b"POST /dialects/x HTTP/1.1"
        behind = line + b"\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 3\r\n\r\nend"
        accepted = compare(Random(seed), count, ports[0], line, [], b'{"a": 1}', behind)
        assert accepted > count / 10
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(20)


# ---- tickets over tcp


class Remote:
    """A bare client of the relay, whose first ticket is Python's; native code takes later ones that are as usual."""

    def __init__(self, context, where, name):
        self.socket = context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.RCVTIMEO, 10_000), (zmq.IDENTITY, b"R" + name)):
            self.socket.setsockopt(option, value)
        self.socket.connect(where)
        self.sequence = 0
        self.lease = self.call(lease=LeaseRequest(model="affine", rows=4)).lease

    def call(self, **request):
        """Make a control call."""
        self.socket.send_multipart((wire.PREFIX, b"12345678", ControlRequest(**request).SerializeToString()))
        while (frames := self.socket.recv_multipart())[1] != b"12345678":
            pass
        return ControlReply.FromString(frames[2])

    def ask(self, record, frames):
        """Send a ticket; return the code of its answer, and the frames behind it."""
        self.sequence += 1
        sequence, lease, left, first, rows, version = self.sequence, self.lease.lease, *record
        made = wire.PACK_TICKET.pack(sequence, lease, left, 0, 0, first, rows, 0, version, 1)
        self.socket.send_multipart((wire.PREFIX + made, *frames))
        while True:
            head, *rest = self.socket.recv_multipart()
            if len(head) >= 10 and int.from_bytes(head[2:10], "little") in (sequence, 0) and len(head) >= 30:
                return Code(int.from_bytes(head[26:30], "little")), rest

    def close(self):
        self.call(release=ReleaseRequest(lane=self.lease.lane, lease=self.lease.lease))
        self.socket.close()


def ticket(random):
    """The fields of a ticket, and its tensors."""
    first, rows = random.choice([(0, 1), (0, 4), (1, 2), (3, 1), (3, 2), (0, 0), (4, 1), (2**32 - 1, 2)])
    left = random.choice([10**10] * 6 + [2**62, -(10**9), 0])  # an engine's turn may have begun a moment ago
    row = np.array([[random.randrange(-99, 99) for _ in range(4)] for _ in range(min(rows, 4))], np.float32).tobytes()
    frames = [row]
    match random.randrange(12):
        case 0:
            frames = [row[:-1]]
        case 1:
            frames = [row, b""]
        case 2:
            frames = []
        case 3:
            frames = [row + b"x"]
        case 4:
            frames = [row[: len(row) // 2], row[len(row) // 2 :]]
    return (left, first, rows, random.choice([0] * 8 + [1, 2**63])), frames


@cases(230, 20_000)
def test_a_ticket_that_native_code_takes_is_answered_as_one_that_python_takes(server, count, seed):
    random, where, context = Random(seed), f"tcp://{server.told['tcp']}", zmq.Context()
    one, accepted = Remote(context, where, b"native"), 0
    try:
        usual = (10**10, 0, 1, 0), [np.ones(4, np.float32).tobytes()]
        for _ in range(3):
            assert one.ask(*usual)[0] == Code.OK
        for number in range(count):
            record, frames = ticket(random)
            native = one.ask(record, frames)
            python = Remote(context, where, b"%d" % number)
            try:
                assert native == python.ask(record, frames), (record, frames)
            finally:
                python.close()
            accepted += native[0] == Code.OK
            assert one.ask(*usual)[0] == Code.OK  # so that native code has the lane again
    finally:
        one.close()
        context.term()
    assert accepted > count / 10
