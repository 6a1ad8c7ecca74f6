"""Clients that violate the protocol, run out of descriptors, never read, or reconnect by the thousand."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import zmq
from tests.serving import wait_until

from jurybox import native
from jurybox.client import Busy
from jurybox.protocol import wire
from jurybox.protocol.address import engine_address
from jurybox.protocol.errors import Code
from jurybox.protocol.segment import segment_name
from jurybox.protocol.shm_rings import ShmRings

X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture
def server(enduring):
    return enduring


class Honest(threading.Thread):
    """Send requests over a transport during the ``with`` block; every answer must be right."""

    def __init__(self, server, transport: str) -> None:
        super().__init__()
        self.client = server.connect(transport=transport)
        self.model = self.client.model("affine", rows=2)
        self.answered, self.wrong, self.error = 0, 0, None
        self._on = True

    def run(self) -> None:
        try:
            while self._on:
                self.wrong += not np.array_equal(self.model.infer(X, timeout=20), 2 * X + 1)
                self.answered += 1
        except Exception as error:  # noqa: BLE001  the test reports it
            self.error = error

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_) -> None:
        try:
            before = self.answered
            wait_until(lambda: self.answered > before + 20 or self.error, 30, "answers afterwards")
        finally:
            self._on = False
            self.join()
            self.client.close()
        assert self.error is None and self.wrong == 0


def lane_and_rings(server, client, model):
    """Of a client's lease: its number, its record on the scoreboard, and the memory of the engine's rings."""
    scoreboard = client._link.scoreboard
    lease = model.requests.lane.leased[1] & 0xFFFFFFFF
    lane = next(n for n, record in enumerate(scoreboard.lanes) if int(record["lease"]) & 0xFFFFFFFF == lease)
    name = segment_name(client.status()["server"]["id"], "rings", int(scoreboard.engines["rings"][0]))
    return lane, scoreboard.lanes[lane].copy(), scoreboard, ShmRings.attach(name)


def test_invalid_tickets_and_those_for_foreign_rows_affect_no_other(server):
    """As a broken client would: posted by the rules of the rings, with nonsense in them."""
    rng = np.random.default_rng(5)
    with Honest(server, "shm") as here, Honest(server, "zmq"), server.connect() as client:
        model = client.model("affine", rows=4)
        lane, record, scoreboard, rings = lane_and_rings(server, client, model)
        *_, theirs, _, other = lane_and_rings(server, here.client, here.model)
        other.close()
        memory = rings.segment.array(np.uint8, (native.RINGS_BYTES,))
        rude = native.ShmRingsClient(memory, lane, int(record["lease"]), rings.pipe, 0)
        incarnation, own = int(scoreboard.engines["incarnation"][0]), int(record["first"])
        allowed, answers = {}, {}
        for number in range(1, 2001):
            first = int(rng.choice([own, own + 1, int(theirs["first"]), 2**32 - 1]))
            rows = int(rng.choice([0, 1, 3, 4, 5, 64, 2**32 - 1]))
            allowed[number] = 0 < rows <= 4 and own <= first and first + rows <= own + 4
            now = time.monotonic_ns()
            while not rude.submit(number, first, rows, now, now + 60 * 10**9, 0, incarnation):
                answers.update((sequence, code) for sequence, code, *_ in rude.receive(1.0))

        def all_answered():
            answers.update((sequence, code) for sequence, code, *_ in rude.receive(0.1))
            return len(answers) == len(allowed)

        wait_until(all_answered, 30, "an answer to every ticket")
        # An honest client never sends more than its rows at once, so some of these requests may be refused.
        right = {True: (Code.OK, Code.BUSY), False: (Code.REFUSED,)}
        assert {number: answers[number] for number, may in allowed.items() if answers[number] not in right[may]} == {}
        assert any(code == Code.OK for code in answers.values())
        rings.close()


def test_an_overwritten_ring_segment_ends_no_process_and_the_other_transport_serves(server):
    """Memory of the same user, written to at random: its own transport may suffer, the server must not."""
    rng = np.random.default_rng(6)
    with Honest(server, "zmq"), server.connect() as client:
        model = client.model("affine", rows=4)
        *_, rings = lane_and_rings(server, client, model)
        memory = rings.segment.array(np.uint8, (native.RINGS_BYTES,))
        for _ in range(200):
            at = int(rng.integers(0, len(memory) - 4096))
            memory[at : at + 4096] = rng.integers(0, 256, 4096, dtype=np.uint8)
            memory[: 64 * 40] = rng.integers(0, 256, 64 * 40, dtype=np.uint8)  # sleeping clients, lanes with tickets
            time.sleep(0.001)
        memory[:] = 0  # a new life's rings would be so
        rings.close()
    assert server.process.poll() is None
    assert "child died" not in server.text()


def test_a_client_that_never_reads_its_answers_costs_only_itself(server, transport):
    with Honest(server, transport), server.connect(transport=transport) as client:
        model = client.model("affine", rows=32)
        with pytest.raises(Busy):
            for _ in range(1000):
                model.submit(X[:1])


def test_a_peer_that_sends_and_never_reads_costs_only_itself(server):
    """Post tickets without end by hand, and read no answers."""
    with Honest(server, "zmq") as honest, server.connect(transport="zmq") as client:
        model = client.model("affine", rows=4)
        lane, record, scoreboard, rings = lane_and_rings(server, client, model)
        rings.close()
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.IDENTITY, wire.lane_identity(lane, int(record["lease"])))
        socket.connect(engine_address(server.address, 0))
        incarnation, before = int(scoreboard.engines["incarnation"][0]), honest.answered
        for number in range(20_000):
            packed = wire.PACK_TICKET.pack(
                number, int(record["lease"]), 0, time.monotonic_ns(), lane, int(record["first"]), 1, 0, 0, incarnation
            )
            try:
                socket.send(wire.PREFIX + packed, zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.001)
        wait_until(lambda: honest.answered > before, 20, "answers to others meanwhile")
        socket.close()
        context.term()


def test_nan_is_answered_as_nan_in_its_own_rows_and_in_no_others(server, transport):
    with server.connect(transport=transport) as client:
        model, other = client.model("moody", rows=8), client.model("moody", rows=8)
        x = np.arange(16, dtype=np.float32).reshape(4, 4)
        x[2, 1] = np.nan
        slow = model.submit(np.full((1, 4), 200_000, np.float32))  # meanwhile the next two wait, and share a batch
        tickets = [model.submit(x), other.submit(np.ones((2, 4), np.float32))]
        slow.result(timeout=20)
        np.testing.assert_array_equal(tickets[0].result(timeout=20).outputs, x + 1)
        np.testing.assert_array_equal(tickets[1].result(timeout=20).outputs, np.full((2, 4), 2, np.float32))


POOR = """
import os, resource, sys, numpy
from jurybox.client import Error, connect
import jurybox.client.local_link, jurybox.client.transports.shm, jurybox.client.transports.zmq
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for free in range(0, 36, 2):
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + free, hard))
    try:
        with connect(sys.argv[1], transport=sys.argv[2], timeout=20) as server:
            print(server.model("affine", rows=1)(numpy.ones(4, "f4")).tolist(), flush=True)
    except Error as error:
        print(type(error).__name__, error, flush=True)
"""


def test_a_client_without_descriptors_gets_an_error_and_still_works(server, transport):
    done = subprocess.run(
        [sys.executable, "-c", POOR, server.address, transport], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-500:]}"  # libzmq would have ended it with SIGABRT
    lines = done.stdout.splitlines()
    refused = [line for line in lines if line.startswith("TooManyFiles")]
    assert refused and all("raise the limit (ulimit -n" in line for line in refused)
    assert lines[-1] == "[3.0, 3.0, 3.0, 3.0]", "with files enough it is answered"
    assert set(lines) - set(refused) == {lines[-1]}, lines


VISITORS = """
import sys, numpy
from jurybox.client import connect
x = numpy.ones((2, 4), "f4")
wrong = 0
for number in range(int(sys.argv[2])):
    address, transport = [(sys.argv[1], "shm"), (sys.argv[1], "zmq"), (sys.argv[3], "auto")][number % 3]
    server = connect(address, transport=transport, timeout=60)
    wrong += not numpy.array_equal(server.model("affine", rows=2).infer(x), 2 * x + 1)
    if number % 5 == 4:
        server.model("moody", rows=1).submit(numpy.full((1, 4), 2000, "f4"))  # and leaves without the answer
    server.close()
print(wrong, flush=True)
server = connect(sys.argv[1], timeout=60)
server.model("moody", rows=2).submit(x)
print("here", flush=True)
sys.stdin.read()
"""


def come_and_go(server, processes: int, each: int) -> None:
    """Run so many clients; the last of each process is killed with a request in flight."""
    with server.connect() as client:
        wait_until(lambda: client.status()["lanes"]["in_use"] == 0, 30, "an empty house")
        descriptors = files_of(server)
        command = [sys.executable, "-c", VISITORS, server.address, str(each), f"tcp://{server.listening('tcp')}"]
        visitors = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(processes)
        ]
        for visitor in visitors:
            assert visitor.stdout.readline() == "0\n"
            assert visitor.stdout.readline() == "here\n"
            visitor.kill()
            visitor.communicate()
        wait_until(lambda: client.status()["lanes"]["in_use"] == 0, 30, "all rows given back")
        wait_until(lambda: files_of(server) <= descriptors + 6, 20, f"its descriptors to be {descriptors} again")


def files_of(server) -> int:
    import psutil

    return sum(psutil.Process(pid).num_fds() for pid in server.pids().values())


def test_clients_come_and_go_and_leave_nothing(server):
    come_and_go(server, 2, 9)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_clients_come_and_go_and_leave_nothing(server):
    come_and_go(server, 10, 100)
