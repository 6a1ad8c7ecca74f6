"""A weights channel that another process of this user has overwritten: an error, or the weights as published.

The tests overwrite all but the weights: the head, the layout, the words for synchronisation, the extra. The weights
have no checksum; a process that may map them can change them.
"""

from __future__ import annotations

import random
import time
import uuid
from contextlib import suppress

import numpy as np
import pytest
from tests.forking import in_a_child

from jurybox.protocol.errors import Error, ProtocolMismatch, Timeout
from jurybox.protocol.segment import segment_name
from jurybox.protocol.weights import WeightsChannel, WeightsLayout
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import WeightsReader

WORDS = 300
SOON = 0.004  # seconds a reader waits for what a scribble hides
LONG = 20.0  # seconds of which one operation may take far less, on any machine


def weights(version: int) -> dict[str, np.ndarray]:
    return {"a": np.full(WORDS, version, np.float64), "b": np.full((3, 5), version % 251, np.uint8)}


class Scribbler:
    """Writes over random words of a channel, and puts them back."""

    def __init__(self, channel: WeightsChannel, seed: int) -> None:
        self.bytes = channel.segment.array(np.uint8, (channel.segment.size,))
        layout = len(channel.layout.to_json())
        first = int(channel._data[0].__array_interface__["data"][0]) - int(self.bytes.__array_interface__["data"][0])
        stride = channel.layout.nbytes + channel.extra_bytes
        slots = 2 if channel.mode == "double_buffer" else 1
        extras = [(first + k * stride + channel.layout.nbytes, 48) for k in range(slots)]
        self.regions = [(0, 88), (256, 192), (256, 192), (512, 8), (4096, layout), *extras]
        self.chance = random.Random(seed)

    def scribble(self) -> str:
        begin, size = self.chance.choice(self.regions)
        at, n = begin + self.chance.randrange(size), self.chance.choice((1, 1, 2, 4, 8, 8, 16))
        kind = self.chance.choice(("random", "zero", "ones", "bit", "count"))
        target = self.bytes[at : min(at + n, begin + size)]
        match kind:
            case "random":
                target[:] = np.frombuffer(self.chance.randbytes(len(target)), np.uint8)
            case "zero":
                target[:] = 0
            case "ones":
                target[:] = 255
            case "bit":
                target[0] ^= 1 << self.chance.randrange(8)
            case "count":
                target[0] += 1
        return f"{kind} of {len(target)} bytes at {at}"


def checked(what: str, published: set[int], read) -> int:
    """1 where it gave an error; the weights that were published otherwise."""
    began = time.monotonic()
    try:
        state, version, extra = read()
    except Error:
        return 1
    finally:
        assert time.monotonic() - began < LONG, f"{what}: an operation hung"
    assert version in published, f"{what}: version {version} was read, which nobody published"
    for name, array in weights(version).items():
        assert (state[name] == array).all(), f"{what}: the weights of version {version} are others"
    assert extra == {"version": version, "mean": [1.5] * 3}, (
        f"{what}: the extra of version {version} is another: {extra}"
    )
    return 0


def fuzz(mode: str, times: int, seed: int) -> tuple[int, int]:
    """Return the number of reads with an error and with the published weights; AssertionError for others."""
    layout = WeightsLayout.of(weights(1))
    name = segment_name(f"fuzz{uuid.uuid4().hex[:8]}", "weights")
    errors = right = 0
    with WeightsChannel.create(name, layout, mode, extra_bytes=512) as channel:
        with Publisher(channel) as publisher:
            for version in (1, 2, 3):
                publisher.publish(weights(version), {"version": version, "mean": [1.5] * 3})
        old, scribbler = WeightsReader(channel), Scribbler(channel, seed)
        whole = scribbler.bytes.copy()
        for _ in range(times):
            scribbler.bytes[:] = whole
            what, published = f"seed {seed}, {scribbler.scribble()}", {2, 3}
            for read in (lambda: old.read(timeout=SOON), lambda: attached(name)):
                failed = checked(what, published, read)
                errors, right = errors + failed, right + 1 - failed
            with suppress(Error), Publisher(channel) as publisher:
                # An overwritten version number is allowed, as long as the weights read under it were published.
                version = channel.newest + 1
                given = publisher.publish(weights(version), {"version": version, "mean": [1.5] * 3})
                assert given == version, what
                published.add(version)
            published.discard(1)
            failed = checked(what, published, lambda: old.read(timeout=SOON))
            errors, right = errors + failed, right + 1 - failed
    return errors, right


def attached(name: str):
    with WeightsChannel.attach(name) as channel:
        return WeightsReader(channel).read(timeout=SOON)


@pytest.mark.parametrize("mode", ["double_buffer", "snapshot"])
def test_an_overwritten_channel_gives_an_error_or_published_weights(mode):
    errors, right = in_a_child(lambda: fuzz(mode, 1000, 17))  # in a child process, whose crash is reported
    assert errors > 50 and right > 50, "this run has shown nothing"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["double_buffer", "snapshot"])
@pytest.mark.parametrize("seed", range(20))
def test_fifty_thousand_scribbles_a_mode(mode, seed):
    errors, right = in_a_child(lambda: fuzz(mode, 2500, 1000 + seed))
    assert errors > 500 and right > 500


def test_an_overwritten_extra_is_an_error_and_the_next_publication_is_read():
    name = segment_name(f"fuzz{uuid.uuid4().hex[:8]}", "weights")
    with WeightsChannel.create(name, WeightsLayout.of(weights(1))) as channel, Publisher(channel) as publisher:
        reader = WeightsReader(channel)
        publisher.publish(weights(1), {"epsilon": 0.1})
        # One digit of a number: it would be read as another one.
        text = channel.segment.array(np.uint8, (channel.segment.size,))
        at = bytes(text).index(b"0.1", bytes(text).index(b"epsilon", 4096)) + 2
        text[at] = ord("9")
        with pytest.raises(ProtocolMismatch, match="damaged"):
            reader.read()
        publisher.publish(weights(2), {"epsilon": 0.2})
        assert reader.read().extra == {"epsilon": 0.2}
        channel.segment.array(np.uint64, (1,), 256)[0] = 2**64 - 1
        with pytest.raises((Timeout, ProtocolMismatch)):
            reader.read(timeout=0.05)
