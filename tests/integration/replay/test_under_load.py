"""Writer processes at full speed: no row is mixed or lost, even if processes are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from jurybox.protocol.segment import directory
from jurybox.training.replay import Field, Replay

WRITER = Path(__file__).with_name("writer.py")
SMALL = {"a": Field((17,)), "b": Field((6,)), "c": Field((), "int64"), "d": Field((17,)), "e": Field((), "float64")}
LARGE = {"a": Field((3000,)), "b": Field((2000,)), "c": Field((), "int64")}

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def run(name: str, number: int, rows: int = 1, total: int = 0) -> subprocess.Popen[str]:
        command = [sys.executable, str(WRITER), name, str(number), str(rows), str(total)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def count_mixed(batch) -> int:
    stamps = batch["c"]
    bad = np.zeros(len(stamps), bool)
    for name in batch:
        column = batch[name].reshape(len(stamps), -1)
        bad |= (column != stamps[:, None]).any(axis=1)
    return int(bad.sum())


def count_mixed_under_load(start: Start, fields, capacity: int, rows: int, *, verify: bool = True) -> int:
    """Return the mixed rows among `rows` sampled while four writers fill the ring continuously."""
    with Replay.create(f"load-{os.getpid()}", capacity, fields, threads=2) as replay:
        writers = [start(replay.name, n) for n in range(4)]
        for writer in writers:
            wait_until_ready(writer)
        for part in replay.parts:
            part.ring.verify = verify
        while len(replay) < capacity:
            time.sleep(0.001)
        batch = replay.batch(256)
        count, bad = 0, 0
        first = replay.added
        # Until the writers have lapped the ring: without that there was no load.
        while (count < rows or replay.added <= first + capacity) and (verify or not bad):
            replay.sample(256, batch)
            bad += count_mixed(batch)
            count += 256
        for writer in writers:
            writer.communicate(timeout=30)
            assert writer.returncode == 0
        return bad


@pytest.mark.parametrize(
    ("fields", "capacity"),
    [pytest.param(SMALL, 64, id="small"), pytest.param(LARGE, 16, id="large", marks=pytest.mark.runs)],
)
def test_no_row_is_mixed_under_four_writers(start, fields, capacity: int) -> None:
    assert count_mixed_under_load(start, fields, capacity, 5_000 if fields is SMALL else 10_000) == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("fields", "capacity"), [(SMALL, 64), (SMALL, 4096), (LARGE, 16)])
def test_none_of_ten_million_rows_is_mixed(start, fields, capacity: int) -> None:
    assert count_mixed_under_load(start, fields, capacity, 10_000_000 if fields is SMALL else 1_000_000) == 0


@pytest.mark.runs
def test_without_verification_the_same_load_mixes_rows(start) -> None:
    assert count_mixed_under_load(start, LARGE, 8, 2_000_000, verify=False) > 0


def test_no_row_is_lost_from_four_writers(start) -> None:
    with Replay.create(f"lost-{os.getpid()}", 12_000, SMALL) as replay:
        writers = [start(replay.name, n, rows=n % 2 * 9 + 1, total=3_000) for n in range(4)]
        for writer in writers:
            output, _ = writer.communicate(timeout=60)
            assert output.split() == ["ready", "3000"]
        batch = replay.sample(12_000, replace=False)
        assert count_mixed(batch) == 0
        # Writers of ten rows use one stamp for all ten.
        wanted = {n * 1_000_000 + i for n in range(4) for i in range(0, 3_000, n % 2 * 9 + 1)}
        assert set(batch["c"].tolist()) == wanted
        assert (replay.added, replay.counters.dropped) == (12_000, 0)


def test_killed_writers_lose_only_their_slots(start) -> None:
    with Replay.create(f"killed-{os.getpid()}", 64, LARGE, prioritized=True) as replay:
        killed = 0
        for _ in range(2):
            writers = [start(replay.name, n, rows=16) for n in range(2)]
            for writer in writers:
                wait_until_ready(writer)
            before = replay.added
            while replay.added < before + 300:
                time.sleep(0.001)
            for writer in writers:
                writer.send_signal(signal.SIGKILL)
                writer.wait()
                killed += 1
        dead = int((replay.parts[0].sequences % 2).sum())
        assert dead <= killed  # each was writing at most one slot
        writer = start(replay.name, 7, rows=1, total=300)
        writer.communicate(timeout=60)
        assert writer.returncode == 0
        batch = replay.sample(64 - dead, uniform=True, replace=False)
        assert count_mixed(batch) == 0
        assert (batch["c"] // 1_000_000 == 7).all()
        replay.repair()
        assert replay.parts[0].ring.total_priority == int(replay.parts[0].leaves.sum())
        assert count_mixed(replay.sample(256)) == 0


def test_a_replay_lives_while_any_process_uses_it(start) -> None:
    code = (
        "import os, sys; from jurybox.training.replay import Field, Replay\n"
        "replay = Replay.create(sys.argv[1], 10, {'c': Field((), 'int64')}); replay.add(c=3)\n"
        "print('made', flush=True); sys.stdin.read(); os._exit(1)"
    )
    name = f"outlives-{os.getpid()}"
    creator = subprocess.Popen(
        [sys.executable, "-c", code, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert creator.stdout is not None
    assert creator.stdout.readline() == "made\n"
    first = Replay.attach(name)
    creator.communicate()
    other = Replay.attach(name)
    other.add(c=4)
    assert sorted(first.sample(2, replace=False)["c"].tolist()) == [3, 4]
    other.close()
    first.close()
    # No process uses it any more, so its name can be used again.
    with Replay.create(name, 10, {"c": Field((), "int64")}) as second:
        assert len(second) == 0
    assert not list(directory().glob(f"*{name}*"))
