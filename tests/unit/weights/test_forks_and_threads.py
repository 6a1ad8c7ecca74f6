"""Publishers and readers after a fork, in threads, when garbage-collected, and after the channel's owner has ended."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.forking import Child, in_a_child

from jurybox.protocol.errors import Refused, ServerGone, Timeout
from jurybox.protocol.weights import WeightsChannel, WeightsLayout
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import WeightsReader


def descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_forked_child_publishes_nothing_and_its_parent_still_can(make, arrays):
    channel = make()
    with Publisher(channel) as publisher:
        publisher.publish(arrays)
        for work in (lambda: publisher.publish(arrays), lambda: Publisher(channel)):
            with pytest.raises(Refused, match="fork|one at a time"):
                in_a_child(work)
        in_a_child(publisher.close)
        assert publisher.publish(arrays) == 2 == channel.newest
        with pytest.raises(Refused, match="one at a time"):
            Publisher(channel)


def test_a_child_that_forks_while_a_thread_publishes_is_refused_and_does_not_hang(make):
    state = {"w": np.zeros(4_000_000, np.float32)}
    publisher, stop = Publisher(make(state)), threading.Event()

    def publish() -> None:
        while not stop.is_set():
            publisher.publish(state)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        for _ in range(10):
            with pytest.raises(Refused, match="fork"):
                in_a_child(lambda: publisher.publish(state))
            in_a_child(publisher.close)
    finally:
        stop.set()
        thread.join()
    publisher.close()


def test_a_learner_that_is_gone_leaves_its_place_though_its_forked_children_live(make, arrays):
    channel = make()
    script = f"""
import os, sys, time
import numpy as np
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights import WeightsChannel
publisher = Publisher(WeightsChannel.attach({channel.name!r}))
began, begins = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(begins, b".")  # what a fork leaves to a child has been let go of by now
    time.sleep(120)
os.read(began, 1)
print(pid, flush=True)
time.sleep(120)
"""
    learner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    orphan = int(learner.stdout.readline())
    try:
        with pytest.raises(Refused, match=f"process {learner.pid}"):
            Publisher(channel)
        learner.kill()
        learner.wait()
        with Publisher(channel) as successor:
            assert successor.publish(arrays) == 1
    finally:
        os.kill(orphan, signal.SIGKILL)
        learner.stdout.close()


def test_a_forked_child_reads_whole_versions_beside_its_parent(make):
    channel = make({"w": np.zeros(500_000)})
    publisher, reader = Publisher(channel), WeightsReader(channel)
    publisher.publish({"w": np.full(500_000, 1.0)})

    def read() -> int:
        last = 0
        for _ in range(50):
            state, version, _ = reader.read(timeout=30)
            assert (state["w"] == version).all() and version >= last
            last = version
        return last

    children = [Child(read) for _ in range(2)]
    for version in range(2, 60):
        publisher.publish({"w": np.full(500_000, float(version))})
    assert all(child.result() > 0 for child in children)
    publisher.close()


def test_a_forked_child_neither_removes_a_channel_nor_keeps_its_owner_alive(make, arrays):
    channel = make()
    go, going = os.pipe()

    def leave() -> None:
        channel.close()

    def outlive() -> bool:
        os.read(go, 1)
        reader = WeightsReader(channel, owner_lives=channel.owner_lives)
        with pytest.raises(ServerGone):
            reader.read()
        return channel.segment.owned

    in_a_child(leave)
    WeightsChannel.attach(channel.name).close()
    child = Child(outlive)
    channel.close()
    os.write(going, b"x")
    assert child.result() is False
    os.close(go), os.close(going)


def test_threads_may_share_a_reader(make):
    channel = make({"w": np.zeros(200_000), "b": np.zeros(3)})
    publisher, reader = Publisher(channel), WeightsReader(channel)
    publisher.publish({"w": np.full(200_000, 1.0), "b": np.full(3, 1.0)}, extra={"version": 1})
    stop, wrong, read = threading.Event(), [], [0] * 4

    def work(number: int) -> None:
        mine = reader.buffers()
        while not stop.is_set():
            for array in mine.values():
                array.fill(-1.0)
            for given in (None, mine):
                state, version, extra = reader.read(timeout=30, out=given)
                if extra["version"] != version or any((array != version).any() for array in state.values()):
                    wrong.append(version)
                read[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 60
    while min(read) < 200 and not wrong and time.monotonic() < end:
        version = float(publisher.version + 1)
        publisher.publish({"w": np.full(200_000, version), "b": np.full(3, version)}, extra={"version": int(version)})
    stop.set()
    for thread in threads:
        thread.join()
    publisher.close()
    assert not wrong and min(read) >= 200


def test_a_reader_whose_channel_has_lost_its_owner_gets_an_error(make, arrays):
    channel = make()
    with Publisher(channel) as publisher:
        publisher.publish(arrays)
    far = WeightsChannel.attach(channel.name)
    reader = WeightsReader(far, in_use=lambda: 0, owner_lives=far.owner_lives)
    assert reader.read().version == 1 and not reader.newer_than(1)
    channel.close()
    for ask in (
        reader.read,
        lambda: reader.read_flat(np.zeros(far.layout.nbytes, np.uint8)),
        lambda: reader.wait_newer_than(1, timeout=30),
        lambda: reader.wait_until_fresh(30, max_lag=0),
    ):
        with pytest.raises(ServerGone, match="connect again"):
            ask()
    end = time.monotonic() + 30
    with pytest.raises(ServerGone):
        while time.monotonic() < end:  # one load from memory, and now and then a look at the owner
            assert not reader.newer_than(1)
    far.close()


def test_ends_of_a_channel_that_was_closed_here_refuse(make, arrays):
    channel = make()
    far = WeightsChannel.attach(channel.name)
    reader, publisher = WeightsReader(far), Publisher(far)
    publisher.publish(arrays)
    far.close()
    for ask in (reader.read, lambda: reader.wait_newer_than(5, 30), lambda: publisher.publish(arrays)):
        with pytest.raises(Refused, match="was closed"):
            ask()
    publisher.close()


def test_a_publisher_that_is_garbage_collected_releases_its_channel(make, arrays):
    channel = make()
    before = descriptors()
    Publisher(channel).publish(arrays)
    gc.collect()
    with Publisher(channel) as publisher:
        assert publisher.publish(arrays) == 2
    assert descriptors() == before


def test_dropped_and_closed_objects_leave_no_descriptor(make):
    channel, closed = make(), []
    before = descriptors()
    for _ in range(20):
        WeightsReader(WeightsChannel.attach(channel.name))
        for end in (WeightsReader, Publisher):
            closed.append(end(WeightsChannel.attach(channel.name), owns=True))
            closed[-1].close()
    assert descriptors() == before and len(closed) == 40


@pytest.mark.parametrize("mode", ["double_buffer", "snapshot"])
def test_no_version_is_so_large_that_it_ends_a_channel(make, arrays, mode):
    with Publisher(make(mode=mode)) as publisher:
        for version in (2**63 - 1, 2**63, 2**64, 2**32 + 1, -1, 0):
            with pytest.raises(Refused, match="version"):
                publisher.publish(arrays, version=version)
        assert publisher.publish(arrays, version=2**32) == 2**32
        assert publisher.publish(arrays) == 2**32 + 1
        with pytest.raises(Refused, match=r"2\*\*32 at most"):
            publisher.publish(arrays, version=2**33 + 2)


@pytest.mark.parametrize("mode", ["double_buffer", "snapshot"])
def test_versions_end_where_the_words_do(make, arrays, mode):
    with Publisher(make(mode=mode)) as publisher:
        assert publisher.restore(arrays, None, 2**63 - 1) == 2**63 - 1  # of a file, say
        with pytest.raises(Refused, match="largest"):
            publisher.publish(arrays)


def test_a_wait_for_a_first_publication_ends_in_time_in_every_thread(make):
    reader, errors = WeightsReader(make()), []

    def wait() -> None:
        try:
            reader.read(timeout=0.2)
        except Timeout as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(errors) == 4 and time.monotonic() - began < 20


def test_layouts_that_numpy_cannot_hold_are_refused():
    for shape in ((1,) * 65, (2**62, 2**62), (2**63,)):
        with pytest.raises(ValueError, match="'w'"):
            WeightsLayout([("w", "float32", shape)])
