"""The processes of the weights channel's fault tests: a publisher at full speed, readers that check every element.

Run as a script: ``weights_roles.py ROLE CHANNEL ...``. Every element of version v is `pattern(v)`, in every tensor, and
the extra contains v as well, so any mixture of two versions is detected.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np

from jurybox.protocol.errors import Timeout
from jurybox.protocol.weights import WeightsChannel, WeightsLayout
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import WeightsReader

_BLOCK = 1 << 16


def pattern(version: int) -> int:
    """Return a word of which every byte differs between neighbouring versions (an odd factor, modulo 2**64)."""
    return version * 0x9E3779B97F4A7C15 % 2**64


def layout(nbytes: int) -> WeightsLayout:
    """Three tensors of uint64, about `nbytes` together: small, large, middling."""
    words = max(nbytes // 8, 16)
    return WeightsLayout(
        [("a", "uint64", (words // 8,)), ("b", "uint64", (words // 2,)), ("c", "uint64", (words * 3 // 8,))]
    )


def torn_words(state: dict, version: int) -> int:
    """Return the number of elements that are not of `version`; computed in blocks that fit into the cache."""
    expected = np.uint64(pattern(version))
    return sum(
        int(np.count_nonzero(array[at : at + _BLOCK] != expected))
        for array in state.values()
        for at in range(0, array.size, _BLOCK)
    )


def write(name: str, seconds: float, pause: float = 0.0) -> None:
    channel = WeightsChannel.attach(name)
    publisher, state = Publisher(channel), channel.layout.views(np.zeros(channel.layout.nbytes, np.uint8))
    end = time.monotonic() + seconds
    while time.monotonic() < end or publisher.version < 3:  # on a busy machine it takes longer
        version = publisher.version + 1
        for array in state.values():
            array.fill(pattern(version))
        publisher.publish(state, extra={"version": version})
        if pause:
            time.sleep(pause)
    print(json.dumps({"published": publisher.version}))


def read(name: str, seconds: float, verify: bool = True, stop_at_tear: bool = False) -> None:
    channel = WeightsChannel.attach(name)
    reader = WeightsReader(channel)
    flat = np.zeros(channel.layout.nbytes, np.uint8)
    state = channel.layout.views(flat)
    parts = np.array([[flat.ctypes.data, 0, flat.size, 0, 0]], np.uint64)
    counts = {"reads": 0, "tries": 0, "torn": 0, "backwards": 0, "extra": 0}
    seen, end = 0, time.monotonic() + seconds
    # A reader that the publisher always overtook still reads the last version.
    while (time.monotonic() < end or counts["reads"] < 2) and not (stop_at_tear and counts["torn"]):
        try:
            if verify:
                _, version, extra = reader.read(out=state, timeout=seconds)
                counts["extra"] += extra != {"version": version}
            else:
                version, _ = reader._read_parts(reader._take_scratch(), parts, seconds, verify=False)
        except Timeout:
            continue
        finally:
            counts["tries"] += reader.tries
        counts["reads"] += 1
        counts["torn"] += torn_words(state, version) > 0
        counts["backwards"] += version < seen
        seen = version
    print(json.dumps(counts))


def nursery(name: str) -> None:
    """Fork a writer or a reader for each line of input, and print its pid: victims without start-up time."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            write(name, 60) if line.strip() == "write" else read(name, 60)
            os._exit(0)
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("dead", flush=True)


if __name__ == "__main__":
    role, channel_name, *rest = sys.argv[1:]
    {"write": write, "read": read, "nursery": nursery}[role](channel_name, *(json.loads(value) for value in rest))
