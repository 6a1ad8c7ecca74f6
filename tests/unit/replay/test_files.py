from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import lz4.block
import numpy as np
import pytest

from jurybox import native
from jurybox.protocol.errors import Refused, SharedMemoryError, SpecMismatch
from jurybox.training.replay import Damaged, Episodes, Field, RateLimiter, Replay, Windows, archive
from jurybox.training.replay import save as saving
from jurybox.training.replay.archive import CODECS, RECORD_BYTES, Archive, ItemKind, head_of, record_head

FIELDS = {"x": Field((600,)), "p": Field((40,), "float32", stored="sparse", nonzero=5), "n": Field((), "int64")}


def add(replay: Replay, first: int, n: int) -> None:
    for i in range(first, first + n):
        replay.add(x=np.full(600, i, np.float32), p=np.eye(40, dtype=np.float32)[i % 40], n=i)


def content(replay: Replay) -> dict[int, float]:
    there = int((replay.parts[0].sequences != 0).sum())
    batch = replay.sample(there, replace=False, uniform=True)
    assert (batch["x"] == batch["n"][:, None]).all() and (batch["p"].argmax(axis=1) == batch["n"] % 40).all()
    return dict(zip(batch["n"].tolist(), batch.indices.tolist(), strict=True))


@pytest.fixture
def loaded():
    made: list[Replay] = []

    def load(path: Path, **options) -> Replay:
        made.append(Replay.load(path, f"loaded-{os.getpid()}-{len(made)}", **options))
        return made[-1]

    yield load
    for replay in made:
        replay.unlink()
        replay.close()


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(saving, "CHUNK_BYTES", 16 << 10)


@pytest.mark.parametrize("codec", ["lz4", "zstd", "none"])
@pytest.mark.parametrize("rows", [0, 30, 130])
def test_a_loaded_replay_continues_where_the_saved_one_ended(make, loaded, tmp_path, small_chunks, codec, rows) -> None:
    replay = make(100, FIELDS)
    add(replay, 0, rows)
    saved = replay.save(tmp_path / "buffer.jbr", codec=codec)
    assert saved.rows == min(rows, 100) and saved.bytes == (tmp_path / "buffer.jbr").stat().st_size
    again = loaded(tmp_path / "buffer.jbr")
    assert (len(again), again.added) == (len(replay), replay.added)
    assert content(again) == content(replay) if rows else True
    add(again, rows, 7)
    assert set(content(again)) == set(range(max(0, rows + 7 - 100), rows + 7))
    assert list(tmp_path.iterdir()) == [tmp_path / "buffer.jbr"]


def test_chunks_are_blocks_as_lz4_itself_has_them(make, loaded, tmp_path, small_chunks) -> None:
    replay = make(100, FIELDS)
    add(replay, 0, 130)
    path = tmp_path / "a"
    replay.save(path)
    archive = Archive(path, recover=False)
    records = list(archive.records())
    file = path.read_bytes()
    out = bytearray(file[: records[0].offset - RECORD_BYTES])
    slots = replay.parts[0].slots
    for record in records:
        payload = file[record.offset : record.offset + record.stored_bytes]
        if record.kind is ItemKind.ROWS:
            assert CODECS[record.codec] == "lz4" and record.stored_bytes < record.raw_bytes / 4
            raw = lz4.block.decompress(payload, uncompressed_size=record.raw_bytes)
            assert raw == slots[record.first : record.first + record.rows].tobytes()
            payload = lz4.block.compress(raw, store_size=False, mode="high_compression")
        out += record_head(
            record.kind, payload, part=record.part, codec=record.codec,
            first=record.first, rows=record.rows, raw_bytes=record.raw_bytes,
        )  # fmt: skip
        out += payload
    archive.close()
    (tmp_path / "b").write_bytes(out)
    assert content(loaded(tmp_path / "b")) == content(replay)


def test_priorities_and_anchor_come_back(make, loaded, tmp_path) -> None:
    replay = make(50, FIELDS, prioritized=True, anchor=5, alpha=1.0)
    add(replay, 0, 50)
    anchor = replay.anchor
    for i in range(100, 103):
        anchor.add(x=np.full(600, i, np.float32), p=np.eye(40, dtype=np.float32)[i % 40], n=i)
    batch = replay.sample(500, anchor_ratio=0.5)
    replay.update_priorities(batch.indices, batch["n"].astype(np.float32))
    replay.save(tmp_path / "b")
    again = loaded(tmp_path / "b")
    for ours, theirs in zip(replay.parts, again.parts, strict=True):
        assert (ours.leaves == theirs.leaves).all()
        assert ours.ring.total_priority == theirs.ring.total_priority
    assert sorted(again.sample(1000)["n"])[-1] == 102


def test_episodes_stay_linked(make, loaded, tmp_path) -> None:
    replay = make(40, {"o": Field((2,)), "reward": Field(), "terminated": Field((), "bool")}, episodes=Episodes())
    for i in range(70):
        replay.add(o=np.full(2, i, np.float32), reward=1.0, terminated=i % 10 == 9)
    replay.add(o=np.full(2, 70, np.float32), reward=1.0, terminated=False)
    replay.save(tmp_path / "b")
    again = loaded(tmp_path / "b")
    batch = again.sample(3000, windows=Windows(n_step=3, gamma=1.0, next="o", stack=2, stacked="o"))
    now, ahead = batch["o"][:, 1, 0], batch["next_o"][:, 1, 0]
    alive = batch["discount"] > 0
    assert (ahead[alive] == now[alive] + 3).all()
    assert (batch["reward"] == np.minimum(3, 10 - now % 10)).all()
    # The last row's episode had no next row, and its writer has ended.
    assert now.max() == 69


def test_an_incremental_save_writes_what_changed(make, loaded, tmp_path, small_chunks) -> None:
    replay = make(400, FIELDS)
    add(replay, 0, 400)
    path = tmp_path / "b"
    full = replay.save(path, codec="none")
    add(replay, 400, 20)
    step = replay.save(path, codec="none", incremental=True)
    assert step.rows == 20
    assert step.bytes - full.bytes < full.bytes / 10
    add(replay, 420, 390)
    assert replay.save(path, incremental=True).rows == 390
    assert content(loaded(path)) == content(replay)
    assert replay.save(path, incremental=True).rows == 0
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(Refused, match="not as the last save left it"):
        replay.save(path, incremental=True)


def test_an_unfinished_incremental_save_leaves_the_one_before(make, loaded, tmp_path, small_chunks) -> None:
    replay = make(100, FIELDS)
    add(replay, 0, 100)
    path = tmp_path / "b"
    before = content(replay)
    size = replay.save(path).bytes
    add(replay, 100, 50)
    whole = replay.save(path, incremental=True).bytes
    for cut in (size + 1, size + 30, (size + whole) // 2, whole - 1):
        os.truncate(path, cut)
        assert content(loaded(path)) == before


def test_a_truncated_file_is_refused_and_its_whole_chunks_recovered(make, loaded, tmp_path, small_chunks) -> None:
    replay = make(200, FIELDS)
    add(replay, 0, 200)
    path = tmp_path / "b"
    replay.save(path, codec="none")
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(Damaged, match=r"cut off after chunk \d+ \(rows of slots \d+..\d+ of part 0"):
        loaded(path)
    rows = content(loaded(path, recover=True))
    assert 60 < len(rows) < 140
    assert rows.items() <= content(replay).items()


def test_every_damaged_byte_is_noticed(make, loaded, tmp_path, small_chunks) -> None:
    replay = make(100, FIELDS, prioritized=True)
    add(replay, 0, 100)
    path = tmp_path / "b"
    replay.save(path, codec="none")
    whole = path.read_bytes()
    everything = content(replay)
    for at in np.random.default_rng(5).integers(0, len(whole), 60):
        broken = bytearray(whole)
        broken[at] ^= 0x40
        path.write_bytes(broken)
        with pytest.raises(Damaged, match=r"chunk \d+|head|saved replay|version|commit"):
            loaded(path)
        if at > 2000:
            rows = content(loaded(path, recover=True))
            assert 50 < len(rows) <= 100 and rows.items() <= everything.items()


def test_a_refused_file_leaves_no_replay(make, tmp_path) -> None:
    replay = make(10, FIELDS)
    path = tmp_path / "b"
    replay.save(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(Damaged):
        Replay.load(path, "left-behind")
    with pytest.raises(SharedMemoryError):
        Replay.attach("left-behind")


def test_a_save_beside_writers_is_a_state_of_whole_rows(make, loaded, tmp_path, small_chunks) -> None:
    replay = make(2000, FIELDS)
    add(replay, 0, 2000)
    other = Replay.attach(replay.name)
    for turn in range(5):
        low = replay.added
        writer = threading.Thread(target=add, args=(other, low, 500), daemon=True)
        writer.start()
        replay.save_in_background(tmp_path / "b", incremental=turn > 2).result(60)
        writer.join(60)
        # One writer: row n is ticket n. All rows of one moment, except those overwritten before the saver reached them.
        rows = content(loaded(tmp_path / "b"))
        assert all(n == ticket for n, ticket in rows.items())
        newest = max(rows)
        assert low - 1 <= newest < low + 500
        assert set(range(low - 1500, newest + 1)) <= set(rows)
    other.close()


def test_a_full_disk_keeps_the_old_file(make, tmp_path, monkeypatch) -> None:
    replay = make(100, FIELDS)
    add(replay, 0, 50)
    path = tmp_path / "b"
    replay.save(path)
    before = path.read_bytes()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving.os, "pwritev", full)
    add(replay, 50, 10)
    for incremental in (False, True):
        with pytest.raises(OSError, match="No space"):
            replay.save(path, incremental=incremental)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


ENDS = """
import builtins, threading, time
from jurybox import native

class Late:
    def __del__(self, sleep=time.sleep, used=time.process_time):
        sleep(0.2)  # the thread notices that the interpreter ends
        before = used()
        sleep(0.5)
        print("slept" if used() - before < 0.15 else "spun", flush=True)

def check(data=bytes(1 << 16), crc32c=native.crc32c):
    while True:
        crc32c(data)

threading.Thread(target=check, daemon=True).start()
builtins.late = Late()
"""


def test_a_thread_that_outlives_the_interpreter_sleeps() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "slept\n", "")


def test_restore_replaces_the_content(make, tmp_path) -> None:
    replay = make(100, FIELDS)
    add(replay, 0, 60)
    was = content(replay)
    replay.save(tmp_path / "b")
    add(replay, 60, 100)
    replay.restore(tmp_path / "b")
    assert content(replay) == was and replay.added == 60


def test_an_incremental_save_after_a_restore_writes_everything(make, loaded, tmp_path) -> None:
    replay = make(100, FIELDS)
    add(replay, 0, 20)
    replay.save(tmp_path / "older")
    add(replay, 20, 30)
    replay.save(tmp_path / "newer")
    replay.restore(tmp_path / "older")
    add(replay, 500, 30)  # under the tickets, and so with the sequence words, of the rows that were saved last
    assert replay.save(tmp_path / "newer", incremental=True).rows == 50
    assert content(loaded(tmp_path / "newer")) == content(replay)
    add(replay, 530, 5)
    assert replay.save(tmp_path / "newer", incremental=True).rows == 5, "the next one builds on it again"


LINKED = {"o": Field(), "reward": Field(), "terminated": Field((), "bool")}


@pytest.mark.parametrize("writer", ["add", "extend", "stream", "streams", "anchor"])
def test_a_row_after_a_restore_follows_no_row_of_what_was_replaced(make, tmp_path, writer) -> None:
    def adder(replay):
        if writer in ("add", "extend"):
            return getattr(replay, writer)
        made = {"stream": replay.stream, "streams": lambda: replay.streams(1), "anchor": lambda: replay.anchor}
        streams[replay.name] = made[writer]()
        return streams[replay.name].add

    def add(write, first: float, end: float) -> None:
        for o in np.arange(first, end, dtype=np.float32):
            row = {"o": o, "reward": 1.0, "terminated": False}
            many = writer in ("extend", "streams")
            write(**{name: np.array([value]) for name, value in row.items()} if many else row)

    streams = {}
    saved, replay = (make(100, LINKED, episodes=Episodes(), anchor=50) for _ in range(2))
    add(adder(saved), 0, 10)
    saved.save(tmp_path / "b")
    write = adder(replay)
    add(write, 100, 105)
    replay.restore(tmp_path / "b")
    add(write, 200, 203)
    ratio = float(writer == "anchor")
    batch = replay.sample(400, windows=Windows(n_step=1, gamma=1.0, next="o", stack=2, stacked="o"), anchor_ratio=ratio)
    before, now, ahead = batch["o"][:, 0], batch["o"][:, 1], batch["next_o"][:, 1]
    assert set(zip(now.tolist(), ahead.tolist(), strict=True)) == {
        *((o, o + 1.0) for o in range(9)), (200.0, 201.0), (201.0, 202.0)
    }  # fmt: skip
    first = (now == 200) | (now == 0)
    assert first.any() and not batch.valid["o"][first, 0].any(), "they begin episodes"
    assert (before[~first] == now[~first] - 1).all()


def test_a_refused_restore_leaves_the_replay_its_rows_and_their_episodes(make, tmp_path) -> None:
    other = make(7, LINKED, episodes=Episodes())
    other.save(tmp_path / "other")
    replay = make(100, LINKED, episodes=Episodes())
    stream = replay.stream()
    for o in range(3):
        stream.add(o=o, reward=1.0, terminated=False)
    replay.save(tmp_path / "own")
    with pytest.raises(SpecMismatch, match="use Replay.load"):
        replay.restore(tmp_path / "other")
    stream.add(o=3, reward=1.0, terminated=False)
    batch = replay.sample(100, windows=Windows(n_step=1, next="o"))
    assert set(batch["o"].tolist()) == {0.0, 1.0, 2.0} and (batch["next_o"] == batch["o"] + 1).all()
    assert replay.save(tmp_path / "own", incremental=True).rows == 2, "the new row, and the one that it follows"


def test_retries_and_samples_are_counted_on_after_load_and_restore(make, loaded, tmp_path) -> None:
    limiter = RateLimiter(samples_per_insert=1, least_rows=1, error=10)
    replay = make(8, limiter=limiter, timeout=0.01)
    replay.parts[0].sequences[3] = 1  # a writer was killed in this slot
    for n in range(30):
        replay.add(x=np.zeros(3, np.float32), n=n)
        replay.sample(1)
    replay.save(tmp_path / "buffer.jbr")
    assert (replay.added, replay.counters.sampled) == (30, 30) and replay.counters.retried > 2
    again = loaded(tmp_path / "buffer.jbr")
    assert (again.added, again.counters.sampled) == (30, 30)
    for n in range(9):
        again.add(x=np.zeros(3, np.float32), n=n)  # the limiter would not let them in, were no sample remembered
    fresh = make(8, limiter=limiter, timeout=0.01)
    fresh.parts[0].sequences[3] = 1
    for n in range(11):
        fresh.add(x=np.zeros(3, np.float32), n=n)
    fresh.save(tmp_path / "small.jbr")
    again.restore(tmp_path / "small.jbr")
    assert again.added == 11


@pytest.mark.parametrize("part", ["slot_bytes", "offsets"])
def test_a_file_whose_rows_are_laid_out_otherwise_is_refused(make, tmp_path, part) -> None:
    replay = make(10, FIELDS)
    add(replay, 0, 5)
    replay.save(tmp_path / "rows")
    data = (tmp_path / "rows").read_bytes()
    head = head_of(replay.layout)
    description = json.loads(head[archive._HEAD.size :])
    if part == "offsets":
        description["offsets"]["n"] += 8
    else:
        description["slot_bytes"] += 8
    text = json.dumps(description).encode()
    other = archive._HEAD.pack(archive.MAGIC, archive.VERSION, len(text), native.crc32c(text)) + text
    (tmp_path / "rows").write_bytes(other + data[len(head) :])
    with pytest.raises(Damaged, match="lays out its rows in another way"):
        Replay.load(tmp_path / "rows", f"laid-out-{os.getpid()}")
    with pytest.raises(Damaged, match="lays out its rows in another way"):
        replay.restore(tmp_path / "rows")
    assert len(replay) == 5


def test_a_file_has_its_name_when_all_of_it_is_on_the_disk(make, tmp_path, monkeypatch) -> None:
    replay, done = make(10, FIELDS), []
    add(replay, 0, 5)
    fsync, replace, pwrite = os.fsync, Path.replace, os.pwrite

    def synced(fd: int) -> None:
        done.append(f"synced {'folder' if stat.S_ISDIR(os.fstat(fd).st_mode) else 'file'}")
        fsync(fd)

    def written(fd: int, content: bytes, at: int) -> int:
        done.extend(["commit"] if ItemKind.COMMIT.to_bytes(1, "little") == bytes(content[4:5]) and at else [])
        return pwrite(fd, content, at)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "pwrite", written)
    monkeypatch.setattr(Path, "replace", lambda self, to: done.append("renamed") or replace(self, to))
    replay.save(tmp_path / "rows")
    assert done == ["synced file", "commit", "synced file", "renamed", "synced folder"]
    done.clear()
    add(replay, 5, 5)
    replay.save(tmp_path / "rows", incremental=True)
    assert done == ["synced file", "commit", "synced file"]
