"""Arbitrary bytes in shared memory: readers get the published data or a documented error."""

import contextlib
import os
import secrets
import time
from random import Random

import numpy as np
import psutil
import pytest
from tests.fuzz.leaks import Watched

from jurybox.client import Error, Publisher, WeightsReader
from jurybox.protocol.scoreboard import Scoreboard
from jurybox.protocol.segment import segment_name
from jurybox.protocol.weights import WeightsChannel, WeightsLayout

SHORT = pytest.param(500, id="short")
LONG = pytest.param(100_000, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(3000)])

STATE = {"weight": np.arange(12, dtype=np.float32).reshape(3, 4), "bias": np.linspace(-1, 1, 3)}
EXTRA = {"step": 7, "names": ["a", "b"], "scale": np.arange(3.0)}
NUMBERS = [0, 1, 2, 3, 4096, 2**16, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.fixture
def name():
    return segment_name(f"fuzz{secrets.token_hex(4)}", "weights")


@pytest.fixture
def watched(capsys):
    """This process's own memory and descriptors: there is no server here."""
    process = psutil.Process()
    files, watched = process.num_fds(), Watched({"reader": process})
    yield watched
    assert process.num_fds() <= files + 2, "descriptors leaked"
    watched.require_flat()
    if os.environ.get("FUZZ_FIGURES"):
        with capsys.disabled():
            print(f"\n  {watched.told()}, {process.num_fds() - files:+d} descriptors")


def scribble(memory, begin, end, random):
    """Write over words, bytes or runs of them, somewhere in memory[begin:end]."""
    for _ in range(random.randrange(1, 4)):
        match random.randrange(4):
            case 0:
                at = random.randrange(begin, end - 7) & ~7
                memory[at : at + 8] = random.choice(NUMBERS).to_bytes(8, "little")
            case 1:
                at = random.randrange(begin, end)
                memory[at] = random.randrange(256)
            case 2:
                at = random.randrange(begin, end)
                memory[at] ^= 1 << random.randrange(8)
            case _:
                at = random.randrange(begin, end - 7)
                count = random.randrange(1, min(200, end - at) + 1)
                memory[at : at + count] = random.randbytes(count)


@pytest.mark.parametrize("mode", ["double_buffer", "snapshot"])
@pytest.mark.parametrize("count", [SHORT, LONG])
def test_any_bytes_in_a_weights_channel(name, watched, mode, count):
    """A process that attaches or reads gets what was published, of which every word is checked, or an error."""
    random = Random(count)
    with (
        WeightsChannel.create(name, WeightsLayout.of(STATE), mode, extra_bytes=512) as channel,
        Publisher(channel) as publisher,
        WeightsReader(channel) as reader,
    ):
        publisher.publish(STATE, {**EXTRA, "step": 6})
        publisher.publish(STATE, EXTRA)
        memory = channel.segment.buffer
        clean = bytes(memory)
        extras = [
            (at, at + 512)
            for at in range(0, len(clean), 4096)
            if clean[at : at + 48] == np.ascontiguousarray(STATE["weight"]).tobytes()
        ]
        head = [(0, 96), (4096, 4096 + 200)]
        places = [*head, *([(256, 448)] * 6), *extras]
        told = 0
        for _ in range(count):
            place = random.choice(places)
            scribble(memory, *place, random)
            watched.came(1)
            began = time.monotonic()
            if place in head:  # an attached process does not read it again
                with contextlib.suppress(Error), WeightsChannel.attach(name) as attached:
                    assert attached.layout.nbytes == channel.layout.nbytes
            try:
                _, version, extra = reader.read(timeout=0)
            except Error:
                told += 1
            else:
                # The word that names the newest may be bent to name the one before it, which was published as well.
                assert version in (1, 2) and extra["step"] == 5 + version and extra["names"] == EXTRA["names"]
                np.testing.assert_array_equal(extra["scale"], EXTRA["scale"])
            assert time.monotonic() - began < 20
            memory[:] = clean
        assert count > told > count / 5
        np.testing.assert_array_equal(reader.read(timeout=0).state["weight"], STATE["weight"])


@pytest.mark.parametrize("count", [SHORT, LONG])
def test_any_bytes_in_a_scoreboards_head(name, watched, count):
    """A process that attaches to a scoreboard gets it or an error, and never memory beyond its end."""
    random = Random(count)
    scoreboard = Scoreboard.create(name, 2, 1.0)
    try:
        memory = scoreboard.segment.buffer
        clean = bytes(memory[:24])
        for _ in range(count):
            scribble(memory, 0, 24, random)
            watched.came(1)
            with contextlib.suppress(Error):
                attached = Scoreboard.attach(name)
                np.array(attached.engines), np.array(attached.lanes), np.array(attached.counters)
                assert len(attached.engines) == 2
                attached.close()
            memory[:24] = clean
    finally:
        scoreboard.close()


def test_a_leak_of_two_hundred_bytes_an_input_does_not_pass_for_flat():
    """What the long runs of this folder are held to, seen to fail where something is kept of every input."""
    watched, kept = Watched({"here": psutil.Process()}), []
    for _ in range(100_000):
        kept.append(bytes(150))
        watched.came(1)
    with pytest.raises(AssertionError, match="here grows with every input"):
        watched.require_flat()
