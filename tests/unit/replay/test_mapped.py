"""A file of the user's as the memory itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jurybox.protocol.errors import SharedMemoryError
from jurybox.training.replay import Episodes, Field, Replay, Windows

FIELDS = {"n": Field((), "int64"), "x": Field((3,))}


def numbered(replay: Replay, first: int, n: int) -> None:
    numbers = np.arange(first, first + n)
    replay.extend(n=numbers, x=np.repeat(numbers[:, None], 3, 1).astype(np.float32))


def whole(replay: Replay) -> list[int]:
    batch = replay.sample(len(replay), replace=False)
    assert (batch["x"] == batch["n"][:, None]).all()
    return sorted(batch["n"].tolist())


def test_rows_are_there_when_all_processes_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "agent0.replay"
    with Replay.create(path, 50, FIELDS) as replay:
        numbered(replay, 0, 70)
    again = Replay.attach(path)
    assert whole(again) == list(range(20, 70))
    assert again.added == 70
    numbered(again, 70, 1)
    second = Replay.attach(path)  # while another has it
    assert whole(second) == list(range(21, 71))
    again.close()
    second.close()
    second.unlink()
    assert not path.exists()


def test_unfinished_rows_of_a_killed_process_are_given_up(tmp_path: Path) -> None:
    path = tmp_path / "agent0.replay"
    code = (
        "import os, sys, pathlib; from jurybox.training.replay import Field, Replay\n"
        "fields = {'n': Field((), 'int64'), 'x': Field((3,))}\n"
        "replay = Replay.create(pathlib.Path(sys.argv[1]), 8, fields, prioritized=True)\n"
        "for i in range(6): replay.add(n=i, x=[i] * 3)\n"
        "replay.parts[0].ring.reserve_run(1)\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    replay = Replay.attach(path)
    assert not (replay.parts[0].sequences % 2).any()
    for first in range(10, 18):  # its slot is as good as any
        numbered(replay, first, 1)
    assert whole_by_uniform(replay) == list(range(10, 18))
    assert replay.counters.retried == 0
    replay.close()


def whole_by_uniform(replay: Replay) -> list[int]:
    return sorted(replay.sample(8, uniform=True, replace=False)["n"].tolist())


def test_abandoned_episodes_are_ended(tmp_path: Path) -> None:
    path, fields = tmp_path / "agent0.replay", {"n": Field((), "int64"), "reward": Field()}
    replay = Replay.create(path, 20, fields, episodes=Episodes())
    for i in range(5):
        replay.add(n=i, reward=1.0)
    replay.close()
    again = Replay.attach(path, seed=1)
    batch = again.sample(50, windows=Windows(length=3))
    ends = batch.valid["sequence"][batch["n"][:, 0] == 4]
    assert len(ends) > 0
    assert (ends == [1, 0, 0]).all()
    again.close()


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "agent0.replay"
    path.write_text("something of the user's")
    with pytest.raises(SharedMemoryError, match="attach to it, or remove it"):
        Replay.create(path, 10, FIELDS)
    assert path.read_text() == "something of the user's"
    with pytest.raises(SharedMemoryError, match=r"Replay\.create"):
        Replay.attach(tmp_path / "missing")


def test_a_saved_replay_is_loaded_into_a_file(tmp_path: Path, make) -> None:
    replay = make()
    replay.extend(x=np.repeat(np.arange(100.0)[:, None], 3, 1), n=np.arange(100))
    replay.save(tmp_path / "saved.jbr")
    loaded = Replay.load(tmp_path / "saved.jbr", tmp_path / "agent0.replay")
    assert whole(loaded) == list(range(100))
    loaded.close()
