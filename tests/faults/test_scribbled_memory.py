"""A process of the server's own user writes nonsense into its memory, and tries to change its size.

It may spoil answers while it is at it: they are in that memory. It may not end the supervisor, nor keep the server from
answering right a moment after it has stopped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.faults.conftest import leaving_nothing
from tests.serving import serving, wait_until

from jurybox.client import Error, ServerGone, connect
from jurybox.protocol.segment import Segment, sweep

X = np.arange(8, dtype=np.float32).reshape(2, 4)
MODELS = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 64, "publish": "double_buffer"},
    "other": {"factory": "tests.models:affine", "args": {"scale": 3.0}, "max_batch": 16, "rows": 64},
}
KINDS = ["scoreboard", "lanes", "arena", "rings", "timings", "weights"]
SECONDS = 0.6

# Random bytes, long runs and single words, everywhere in a segment or in a part of it.
SCRIBBLE = """
import random, sys, time
import numpy as np
from jurybox.protocol.segment import Segment
name, seed, seconds, first, last = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
segment = Segment.attach(name)
memory = segment.array(np.uint8, (segment.size,))[first : last or segment.size]
chance = np.random.default_rng(seed)
print("at it", flush=True)
until, rounds = time.monotonic() + seconds, 0
while time.monotonic() < until:
    rounds += 1
    if rounds % 50 == 1:
        memory[:] = np.frombuffer(chance.bytes(len(memory)), np.uint8) if rounds % 100 == 1 else 255 * (rounds % 3 > 0)
    for _ in range(20):
        at = int(chance.integers(0, len(memory) - 8)) // 8 * 8
        memory[at : at + 8] = np.frombuffer(chance.bytes(8), np.uint8)
    time.sleep(0.001)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with leaving_nothing(), serving(tmp_path_factory.mktemp("server"), MODELS, traces=True, replicas=2) as running:
        yield running
        assert running.process.poll() is None
        assert running.stop() == 0


def names(server):
    with server.connect() as client:
        return list(client.status()["memory"]["segments"])


def answers_right(server, transport):
    with connect(server.address, timeout=5.0, transport=transport) as client:
        for name, scale in (("affine", 2), ("other", 3)):
            with client.model(name, rows=4) as model:
                for _ in range(20):
                    np.testing.assert_array_equal(model.infer(X, timeout=5.0), scale * X + 1)


def scribbler(name, seed, first=0, last=0):
    command = [sys.executable, "-c", SCRIBBLE, name, str(seed), str(SECONDS), str(first), str(last)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "at it\n"
    return process


def test_the_size_of_a_segment_cannot_change(server):
    held = names(server)
    assert {name.rsplit("-", 2)[1] for name in held} == {"scoreboard", "arena", "rings", "timings", "weights"}
    for name in held:
        segment = Segment.attach(name)
        with pytest.raises(PermissionError):
            os.truncate(f"/proc/self/fd/{segment.fd}", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, segment.size + 4096)
        segment.close()
    answers_right(server, "shm")


@pytest.mark.parametrize("transport", ["shm", pytest.param("zmq", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_answers_right_a_moment_after_its_memory_was_scribbled(server, kind, transport):
    segment = "scoreboard" if kind == "lanes" else kind
    name = next(name for name in names(server) if f"-{segment}-" in name)
    where = {"lanes": (8192, 73728), "weights": (0, 1024)}.get(kind, (0, 0))
    seen = []
    with connect(server.address, timeout=5.0, transport=transport) as client, client.model("affine", rows=4) as model:
        model.infer(X)
        process = scribbler(name, 7, *where)
        while process.poll() is None:
            try:
                model.infer(X, timeout=0.5)
            except Error as error:  # named; any exception that is not a Jurybox error fails the test
                seen.append(type(error).__name__)
            try:
                client.status()
                answers_right(server, transport)
            except (Error, AssertionError) as error:
                seen.append(type(error).__name__)
        assert server.process.poll() is None
        until = time.monotonic() + 20
        while True:
            try:
                model.infer(X, timeout=1.0)  # the connection that was there all the time, too
                answers_right(server, transport)
                break
            except (Error, AssertionError) as error:
                seen.append(type(error).__name__)
                assert time.monotonic() < until, (seen, server.text()[-4000:])
        np.testing.assert_array_equal(model.infer(X, timeout=5.0), 2 * X + 1)
        document = client.status()
        assert [engine["state"] for engine in document["engines"]] == ["serving", "serving"]


def test_weights_are_published_after_their_channel_was_scribbled(server):
    name = next(name for name in names(server) if "-weights-" in name)
    assert scribbler(name, 3, 0, 1024).wait(30) == 0
    with server.connect() as client:
        weights = {"scale": np.array(7.0, np.float32), "offset": np.array(1.0, np.float32)}

        def published():
            try:
                with client.publisher("affine") as publisher:
                    publisher.publish(weights)
            except Error:
                return False
            return True

        wait_until(published, 20, "a publication")
        model = client.model("affine", rows=4)
        wait_until(lambda: np.array_equal(model.infer(X), 7 * X + 1), 20, "its use")
        back = {"scale": np.array(2.0, np.float32), "offset": np.array(1.0, np.float32)}
        with client.publisher("affine") as publisher:
            publisher.publish(back)
        wait_until(lambda: np.array_equal(model.infer(X), 2 * X + 1), 20, "its use")


def test_engines_do_not_spin_over_a_channel_that_was_scribbled(server):
    engines = [pid for role, pid in server.pids().items() if role.startswith("engine")]

    def spent():
        fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in engines]
        return sum(int(ticks) for of in fields for ticks in of[11:13])

    name = next(name for name in names(server) if "-weights-" in name)
    assert scribbler(name, 5, 0, 1024).wait(30) == 0
    before, began = spent(), time.monotonic()
    time.sleep(1.5)
    assert (spent() - before) / os.sysconf("SC_CLK_TCK") < 0.5 * (time.monotonic() - began)


def test_clients_notice_the_servers_death_despite_an_overwritten_scoreboard(tmp_path):
    with serving(tmp_path, MODELS) as server, server.connect() as client:
        model = client.model("affine", rows=4)
        model.infer(X)
        name = next(name for name in names(server) if "-scoreboard-" in name)
        process = scribbler(name, 1)
        server.process.kill()
        server.process.wait()
        with pytest.raises((ServerGone, Error)):
            for _ in range(100):
                model.infer(X, timeout=2.0)
        process.wait()
    assert sweep()
