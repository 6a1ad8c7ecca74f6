"""A publisher or a reader killed anywhere leaves the last whole version, and its place."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from tests.faults.weights_roles import layout, pattern, torn_words

from jurybox.protocol.errors import Refused
from jurybox.protocol.segment import segment_name
from jurybox.protocol.weights import WeightsChannel
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import WeightsReader


class Nursery:
    """Victims by the line: each is forked from one small process, so that a thousand take seconds."""

    def __init__(self, name: str) -> None:
        script = str(Path(__file__).with_name("weights_roles.py"))
        self._process = subprocess.Popen(
            [sys.executable, script, "nursery", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, role: str) -> int:
        self._process.stdin.write(f"{role}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert self._process.stdout.readline() == "dead\n"

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)


def kill_writers(times: int, nbytes: int) -> int:
    """Kill so many publishers in a row; return how many died while they wrote a slot."""
    chance = random.Random(20)
    name = segment_name(f"kill{uuid.uuid4().hex[:8]}", "weights")
    half_written = 0
    with WeightsChannel.create(name, layout(nbytes)) as channel:
        reader, nursery = WeightsReader(channel), Nursery(name)
        try:
            last = 0
            for _ in range(times):
                pid = nursery.start("write")
                assert reader.wait_newer_than(last, timeout=30), "the next publisher did not take over"
                time.sleep(chance.random() * 0.005)  # the random point that is tested
                nursery.kill(pid)
                announced = channel.newest
                state, version, extra = reader.read(timeout=5)
                assert version == announced > last and extra == {"version": version}
                assert torn_words(state, version) == 0
                last = version
                sequences = channel.segment.array(np.uint64, (24,), 256)[[8, 16]]
                half_written += int((sequences % 2).any())
            with Publisher(channel) as successor:
                assert successor.publish(channel.layout.views(np.zeros(channel.layout.nbytes, np.uint8))) == last + 1
        finally:
            nursery.close()
    return half_written


def kill_readers(times: int, nbytes: int) -> None:
    chance = random.Random(21)
    name = segment_name(f"kill{uuid.uuid4().hex[:8]}", "weights")
    with WeightsChannel.create(name, layout(nbytes)) as channel, Publisher(channel) as publisher:
        nursery, reader = Nursery(name), WeightsReader(channel)
        state = channel.layout.views(np.zeros(channel.layout.nbytes, np.uint8))
        try:
            for _ in range(times):
                pid = nursery.start("read")
                end = time.monotonic() + chance.random() * 0.005
                while time.monotonic() < end or publisher.version == 0:
                    for array in state.values():
                        array.fill(pattern(publisher.version + 1))
                    publisher.publish(state)
                nursery.kill(pid)
                got, version, _ = reader.read()
                assert version == publisher.version and torn_words(got, version) == 0
        finally:
            nursery.close()


def test_a_killed_publisher_leaves_the_last_whole_version_and_its_place():
    assert kill_writers(40, 1_000_000) > 0, "no publisher died in the middle of a slot: this run has shown nothing"


def test_a_killed_reader_affects_no_other():
    kill_readers(15, 1_000_000)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_kills():
    assert kill_writers(500, 1_000_000) + kill_writers(150, 20_000_000) + kill_writers(100, 1_000) > 0
    kill_readers(250, 1_000_000)


def test_a_living_publisher_keeps_its_place_and_a_killed_one_loses_it():
    name = segment_name(f"kill{uuid.uuid4().hex[:8]}", "weights")
    with WeightsChannel.create(name, layout(1000)) as channel:
        nursery = Nursery(name)
        try:
            pid = nursery.start("write")
            assert WeightsReader(channel).wait_newer_than(0, timeout=30)
            with pytest.raises(Refused, match=f"process {pid}"):
                Publisher(channel)
            nursery.kill(pid)
            Publisher(channel).close()
        finally:
            nursery.close()
