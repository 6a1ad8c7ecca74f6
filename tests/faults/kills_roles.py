"""The processes around the server in the thousand kills: a probe of health, a vandal, a publisher with its reader.

python -m tests.faults.kills_roles ROLE ARGUMENTS...; each runs until its input ends, or until it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from tests.faults.asker import CALL, ask, keep_wrong, same

from jurybox.client import Error, Model, Server, connect
from jurybox.protocol import wire
from jurybox.protocol.address import engine_address

EVERY = 0.05  # seconds between two questions of the probe: is it well, and is a request answered
TIMEOUT = 2.0  # seconds that its request brings, as much as health gives a model
SILENT = 60.0  # seconds after which an HTTP answer is taken as lost
MOST = 45  # pairs in flight: those of the time-out; on a slower machine there are fewer requests
RECORD = struct.Struct("5d")  # sent at, the requests' end and outcome, health's end and outcome
YES, NO, WRONG, GONE = 1.0, 0.0, -1.0, -2.0  # GONE: no connection, or one that broke
ASKED = np.array([1, 2, 3, 4], np.float32)
ROW = {"name": "observation", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
TEXT = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["aye"]}
NUMBER = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [7]}


def told_to_end() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


async def http(port: int, head: bytes, body: bytes = b"") -> tuple[int, bytes]:
    """Status and body of one request on a connection of its own; status 0 where there was no answer."""
    with contextlib.suppress(OSError, TimeoutError, ValueError, IndexError):
        async with asyncio.timeout(SILENT):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(head + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
                head, _, content = (await reader.read()).partition(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                return (int(head.split(b" ", 2)[1]), content) if len(content) == length else (0, b"")  # cut off
            finally:
                writer.close()
    return 0, b""


def affine(_version: int) -> np.ndarray:
    return 2 * ASKED + 1


def moody(_version: int) -> np.ndarray:
    return ASKED + 1


def policy(version: int) -> np.ndarray:
    """Every element of version v is v; before the first publication it is a model as `affine` is."""
    return version * ASKED + version if version else 2 * ASKED + 1


async def works(port: int, reasons: Path) -> float:
    """Whether every model answers: health speaks of all of them, and each may be the one that does not."""
    one_step = {"sequence_id": uuid.uuid4().hex, "sequence_start": True, "sequence_end": True}
    outcomes = await asyncio.gather(
        *(answers(port, reasons, expected.__name__, ROW, expected) for expected in (affine, moody, policy)),
        answers(port, reasons, "shout", TEXT, lambda _: ["AYE"]),
        answers(port, reasons, "sum", NUMBER, lambda _: [7], **one_step),
    )
    return WRONG if WRONG in outcomes else min(outcomes)


async def answers(
    port: int,
    reasons: Path,
    model: str,
    row: Mapping[str, object],
    expected: Callable[[int], Sequence[Any]],
    **parameters: object,
) -> float:
    body = json.dumps({"inputs": [row], "parameters": {"timeout": int(TIMEOUT * 1e6), **parameters}}).encode()
    status, content = await http(port, b"POST /v2/models/%s/infer" % model.encode(), body)
    if status != 200:
        note(reasons, b"request to %s: %d %s" % (model.encode(), status, content))
        return NO if status else GONE
    answer = json.loads(content)
    right = np.array_equal(answer["outputs"][0]["data"], expected(int(answer["model_version"])))
    return YES if right else WRONG


def note(reasons: Path, what: bytes) -> None:
    with reasons.open("ab") as file:
        file.write(b"%.3f %s\n" % (time.monotonic(), what))


async def well(port: int, reasons: Path) -> float:
    status, content = await http(port, b"GET /health")
    if status not in (0, 200):
        note(reasons, content)
    return YES if status == 200 else NO if status else GONE


async def probe(port: int, journal: Path) -> None:
    """Ask both at the same moment, every EVERY seconds, whether or not the earlier ones are answered."""

    async def timed(question: Awaitable[float]) -> tuple[float, float]:
        outcome = await question
        return time.monotonic(), outcome

    async def both(at: float) -> None:
        request, health = await asyncio.gather(timed(works(port, reasons)), timed(well(port, reasons)))
        file.write(RECORD.pack(at, *request, *health))
        file.flush()

    reasons = journal.with_suffix(".reasons")
    running: set[asyncio.Task[None]] = set()
    with journal.open("ab") as file:
        due = time.monotonic()
        while not told_to_end():
            if len(running) < MOST:
                task = asyncio.create_task(both(time.monotonic()))
                running.add(task)
                task.add_done_callback(running.discard)
            due = max(due + EVERY, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
        await asyncio.gather(*running)


def publish(address: str) -> None:
    """Every element of version v is v; a publisher that finds the place of its dead predecessor taken waits."""
    with connect(address, timeout=60) as server:
        while not told_to_end():
            with contextlib.suppress(Error):
                publisher = server.publisher("policy")
                while not told_to_end():
                    value = np.array(publisher.version + 1, np.float32)
                    publisher.publish({"scale": value, "offset": value})
                    time.sleep(0.01)
            time.sleep(0.05)


def follow(address: str, journal: Path) -> None:
    """Ask the model that is published: an answer is wrong that is of no version, or not of the one it names."""
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    with connect(address, timeout=60) as server, journal.open("ab") as file:
        model = server.model("policy", rows=2)
        while not told_to_end():
            began, outcome = time.monotonic(), NO
            with contextlib.suppress(Error):
                reply = model.infer_reply(x)
                scale, offset = (reply.version, reply.version) if reply.version else (2, 1)
                outcome = YES if same(reply.outputs, scale * x + offset, f"version {reply.version}") else WRONG
                if outcome == WRONG:
                    keep_wrong(journal)
            file.write(CALL.pack(began, time.monotonic(), outcome))
            file.flush()
            time.sleep(0.01)


class Vandal:
    """Send invalid input to every port; report what is accepted but should be refused."""

    def __init__(self, address: str, tcp: int, web: int, grpc: int, log: Path) -> None:
        self.address, self.ports, self.web = address, {"tcp": tcp, "http": web, "grpc": grpc}, web
        self.rng = random.Random()
        self.context = zmq.Context()
        self.log = log
        self.server: Server | None = None
        self.moody: Model | None = None

    def run(self) -> None:
        deeds: list[Callable[[], None]] = [
            self.messages_to_an_engine,
            self.messages_to_the_supervisor,
            self.messages_to_the_relay,
            self.bytes_to_a_port,
            self.bad_http,
            self.bad_names,
            self.rows_that_raise,
            self.truncated_memory,
            self.scribbled_rows,
            self.answers_unread,
        ]
        while not told_to_end():
            deed = self.rng.choice(deeds)
            with contextlib.suppress(Error, OSError, zmq.ZMQError):  # whoever is away, is
                deed()
                with self.log.open("a") as file:
                    file.write(f"{deed.__name__}\n")
            time.sleep(0.02)

    def noise(self, most: int = 200) -> bytes:
        return self.rng.randbytes(self.rng.randint(0, most))

    def send(self, address: str) -> None:
        socket = self.context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDTIMEO, 100)
            socket.connect(address)
            for _ in range(20):
                first = self.rng.choice([wire.PREFIX, b"", self.noise(4)])
                parts = [self.noise() for _ in range(self.rng.randint(0, 5))]
                if self.rng.random() < 0.5:
                    parts.insert(0, self.rng.randbytes(wire.PACK_TICKET.size))
                socket.send_multipart([first + b"".join(parts[:1]), *parts[1:]])
        finally:
            socket.close()

    def messages_to_an_engine(self) -> None:
        self.send(engine_address(self.address, self.rng.randrange(2)))

    def messages_to_the_supervisor(self) -> None:
        self.send(self.address)

    def messages_to_the_relay(self) -> None:
        self.send(f"tcp://127.0.0.1:{self.ports['tcp']}")

    def bytes_to_a_port(self) -> None:
        first = self.rng.choice(
            [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\xff\0\0\0\0\0\0\0\1\x7f", b"GET / HTTP/1.1"]
        )
        with socket.create_connection(("127.0.0.1", self.rng.choice(list(self.ports.values()))), 1) as connection:
            connection.sendall(first + self.noise(4000))

    def post(self, path: str, body: bytes) -> int:
        with socket.create_connection(("127.0.0.1", self.web), 1) as connection:
            connection.settimeout(5)
            head = (
                f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode() + body)
            answer = connection.recv(4000).split(b" ", 2)
            return int(answer[1]) if len(answer) > 1 else 0

    def bad_http(self) -> None:
        bodies = [b"{", b'{"inputs": 3}', b'{"inputs":[{"name":"\\ud800"}]}', b"[" * 900, self.noise(4000)]
        status = self.post("/v2/models/affine/infer", self.rng.choice(bodies))
        self.expect(status in (0, 400, 422, 429, 503), f"bad HTTP got {status}")

    def bad_names(self) -> None:
        name = self.rng.choice(["nobody", "..%2F..", "a" * 5000, "%00", "affine%20"])
        status = self.post(f"/v2/models/{name}/infer", json.dumps({"inputs": [ROW]}).encode())
        self.expect(status in (0, 404, 503), f"a bad name got {status}")

    def rows_that_raise(self) -> None:
        mood = self.rng.choice([666, 667])
        row = {**ROW, "data": [mood] * 4}
        body = json.dumps({"inputs": [row], "parameters": {"timeout": 2_000_000}}).encode()
        status = self.post("/v2/models/moody/infer", body)
        self.expect(status in (0, 500, 503, 504), f"a row that raises got {status}")

    def truncated_memory(self) -> None:
        self.connected()
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # it has ended meanwhile, or it is refused, as expected
                name = str(entry.readlink())
                if "memfd" in name and "jurybox" in name:
                    os.ftruncate(int(entry.name), 0)
                    self.expect(os.fstat(int(entry.name)).st_size > 0, f"{name} was truncated")

    def scribbled_rows(self) -> None:
        """Its own, while an engine may be reading them."""
        model = self.connected()
        with model.rows(2) as rows:
            for arrays in (rows.inputs, rows.outputs):
                for array in arrays.values():
                    array[...] = np.frombuffer(self.rng.randbytes(array.nbytes), array.dtype).reshape(array.shape)
            rows.inputs["observation"][:, 0] = 5  # no mood that would sleep
            rows.infer(timeout=5)

    def answers_unread(self) -> None:
        model = self.connected()
        for _ in range(3):
            model.submit(np.ones((1, 4), np.float32), timeout=1)
        with socket.create_connection(("127.0.0.1", self.web), 1) as connection:
            connection.sendall(b"GET /status HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 50)
            time.sleep(0.2)

    def connected(self) -> Model:
        if self.moody is None or self.rng.random() < 0.1:
            if self.server is not None:
                self.server.close()
                self.server = self.moody = None
            self.server = connect(self.address, timeout=5)
            self.moody = self.server.model("moody", rows=4)
        return self.moody

    def expect(self, condition: bool, otherwise: str) -> None:
        if not condition:
            with self.log.open("a") as file:
                file.write(f"! {otherwise}\n")


def nursery() -> None:
    """Fork the process that a line of input names and print its pid: victims without start-up time that end with it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no parent waits for them
    born: list[int] = []
    for line in sys.stdin:
        ear, mouth = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(ear, 0)
            os.close(mouth)
            with contextlib.suppress(Error):
                victim(*line.split())
            os._exit(0)
        os.close(ear)
        born.append(mouth)
        print(pid, flush=True)
    for mouth in born:
        os.close(mouth)


def victim(role: str, address: str, *rest: str) -> None:
    sys.stdin = os.fdopen(0)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123
    if role == "client":
        with Path(rest[1]).open("ab") as journal:
            ask(address, rest[0], journal)
    elif role == "publisher":
        publish(address)
    else:
        Vandal(address, int(rest[0]), int(rest[1]), int(rest[2]), Path(rest[3])).run()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["probe", port, journal]:
            asyncio.run(probe(int(port), Path(journal)))
        case ["follow", address, journal]:
            follow(address, Path(journal))
        case ["nursery"]:
            nursery()
