"""Checks for a free-threaded Python; run by one that has the wheel, optionally with addresses of a server.

Imports do not enable the GIL, and many threads at once use one ring, one weights channel, one model and one lane. Under
a Python built with the thread sanitizer it finds data races in the native part.
"""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

THREADS = 6
ROUNDS = int(os.environ.get("WITHOUT_THE_LOCK_ROUNDS", "300"))


def at_once(*work: Callable[[], None]) -> None:
    """Run each in a thread of its own, all from the same moment on; raises what the first of them raises."""
    start = threading.Barrier(len(work))

    def run(part: Callable[[], None]) -> None:
        start.wait(60)
        part()

    with ThreadPoolExecutor(len(work)) as pool:
        for future in [pool.submit(run, part) for part in work]:
            future.result(600)


def require_no_lock() -> None:
    """Everything that a worker imports declares itself fit for threads."""
    import google.protobuf.message  # noqa: F401
    import zmq  # noqa: F401

    import jurybox.client
    from jurybox import native

    assert sysconfig.get_config_var("Py_GIL_DISABLED"), "this Python has a lock: a free-threaded one was expected"
    assert os.environ.get("PYTHON_GIL") != "1"
    assert jurybox.client.connect and native.RINGS_LANES
    assert not sys._is_gil_enabled(), "an import has switched the interpreter's lock on"


def one_ring() -> None:
    """The very first call, from all threads at once; then rows are never torn, with several writers and samplers."""
    from jurybox.protocol.errors import Busy
    from jurybox.training.replay import Field, Replay

    fields = {"value": Field((), "int64"), "row": Field((64,), "int64"), "large": Field((2000,), "float32")}
    with Replay.create(f"lock-{os.getpid()}", 200, fields, prioritized=True) as replay:

        def write(who: int) -> Callable[[], None]:
            def loop() -> None:
                for i in range(ROUNDS):
                    value = who * ROUNDS + i
                    rows = {"value": value, "row": np.full(64, value), "large": np.full(2000, value % 1000, np.float32)}
                    if i % 2:
                        replay.extend(**{name: np.repeat(np.asarray(part)[None], 3, 0) for name, part in rows.items()})
                    else:
                        replay.add(**rows)

            return loop

        def draw() -> None:
            while len(replay) == 0:
                pass
            for _ in range(ROUNDS):
                batch = replay.sample(16)
                assert (batch["row"] == batch["value"][:, None]).all()
                assert (batch["large"] == (batch["value"] % 1000)[:, None]).all()
                replay.update_priorities(batch.indices, np.ones(16, np.float32))

        at_once(*[write(who) for who in range(THREADS)], draw, draw)
        assert replay.added == THREADS * (ROUNDS // 2 * 4 + ROUNDS % 2)

        # One batch for two threads is an error, and a clear one: never rows of both.
        mine, refused = replay.sample(64), []

        def same_batch() -> None:
            for _ in range(ROUNDS):
                try:
                    replay.sample(64, out=mine)
                except Busy as error:
                    refused.append(str(error))

        at_once(same_batch, same_batch, same_batch)
        assert all("another thread" in text for text in refused)


def one_weights_channel() -> None:
    """Threads that share a publisher number their versions in turn; threads that share a reader get whole ones."""
    from jurybox.protocol.segment import segment_name
    from jurybox.protocol.weights import WeightsChannel, WeightsLayout
    from jurybox.protocol.weights.publisher import Publisher
    from jurybox.protocol.weights.reader import WeightsReader

    state = {"weight": np.zeros(20_000, np.float32), "bias": np.zeros(3, np.float64)}
    channel = WeightsChannel.create(segment_name(f"lock{os.getpid()}", "weights"), WeightsLayout.of(state))
    try:
        reader, done = WeightsReader(channel), threading.Event()
        with Publisher(channel) as publisher:
            publisher.publish(state, {"value": 0})

            def publish(who: int) -> Callable[[], None]:
                def loop() -> None:
                    for i in range(ROUNDS):
                        value = who * ROUNDS + i
                        own = {name: np.full_like(array, value) for name, array in state.items()}
                        publisher.publish(own, {"value": value})
                    if channel.newest == 3 * ROUNDS + 1:
                        done.set()

                return loop

            def read() -> None:
                seen = 0
                while not done.is_set():
                    weights = reader.read(timeout=60.0)
                    assert weights.version >= seen
                    seen = weights.version
                    for array in weights.state.values():
                        assert (array == weights.extra["value"]).all()

            at_once(*[publish(who) for who in range(3)], read, read, read)
            assert channel.newest == 3 * ROUNDS + 1
    finally:
        channel.close()


def one_model(address: str, transport: str) -> None:
    """Each thread gets the answers to its own rows, while an event loop has tickets in flight on the same lane."""
    from jurybox.client import connect

    with connect(address, transport=transport, timeout=60.0) as server:
        model = server.model("affine", rows=16)

        def ask(who: int) -> Callable[[], None]:
            def loop() -> None:
                for i in range(ROUNDS // 3):
                    row = np.arange(4, dtype=np.float32) + who * 1000 + i
                    assert np.array_equal(model(row, timeout=60.0), 2 * row + 1)
                    rows = np.stack([row, row + 1])
                    assert np.array_equal(model.infer(rows, timeout=60.0), 2 * rows + 1)

            return loop

        def in_a_loop() -> None:
            async def one(i: int) -> None:
                rows = np.full((2, 4), i, np.float32)
                assert np.array_equal(await model.infer_async(rows, timeout=60.0), 2 * rows + 1)

            async def all_of_them() -> None:
                for i in range(ROUNDS // 10):
                    await asyncio.gather(*(one(10 * i + k) for k in range(3)))

            asyncio.run(all_of_them())

        at_once(*[ask(who) for who in range(THREADS)], in_a_loop)


if __name__ == "__main__":
    require_no_lock()
    one_ring()
    one_weights_channel()
    for given in sys.argv[1:]:
        for over in ("shm", "zmq") if given.startswith("ipc") else ("auto",):
            one_model(given, over)
    assert not sys._is_gil_enabled(), "something has switched the interpreter's lock on"
    sys.stdout.write("threads need no lock\n")
