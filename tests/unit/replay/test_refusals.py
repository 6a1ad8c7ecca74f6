"""What a replay refuses, and that the nearest thing to it is taken."""

from __future__ import annotations

import errno
import os
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.descriptors import open_files

from jurybox.protocol.errors import Busy, ProtocolMismatch, Refused, SharedMemoryError, SpecMismatch
from jurybox.training.replay import Damaged, Episodes, Field, RateLimiter, Replay, Windows
from jurybox.training.replay.layout import Layout

X = {"x": Field(())}
MANY = {f"x{i}": Field(()) for i in range(65)}


@pytest.mark.parametrize(
    ("given", "taken", "why"),
    [
        ({"capacity": 0}, {"capacity": 1}, "capacity=0 must be at least 1"),
        ({"anchor": -1}, {"anchor": 1}, "anchor=-1 at least 0"),
        ({"fields": {}}, {"fields": X}, "1 to 64 fields, came 0"),
        ({"fields": MANY}, {"fields": dict(list(MANY.items())[1:])}, "1 to 64 fields, came 65"),
        (
            {"full": "wait"},
            {"full": "drop_newest"},
            "full='wait' is unknown: expected one of overwrite, block, drop_newest",
        ),
        ({"alpha": -0.1}, {"alpha": 0.0}, "alpha=-0.1 must be between 0 and 1"),
        ({"alpha": 1.1}, {"alpha": 1.0}, "alpha=1.1 must be between 0 and 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_layout_that_cannot_be_is_refused_and_the_nearest_one_is_made(given, taken, why) -> None:
    whole: dict[str, Any] = {"capacity": 10, "fields": X}
    with pytest.raises(ValueError, match=why):
        Layout(**whole | given)
    assert Layout(**whole | taken).segment_bytes > 0


def other_version(head: bytes) -> bytes:
    """The head with the number after its magic of eight bytes raised by one."""
    (version,) = struct.unpack_from("<I", head, 8)
    return head[:8] + struct.pack("<I", version + 1) + head[12:]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (lambda head: head[:7], "is no replay: it is only 7 bytes long"),
        (lambda head: b"?" + head[1:], "is no replay: expected it to begin with"),
        (other_version, "use the same release of jurybox on both ends"),
        (lambda head: head, r"is \d+ bytes long, its head says \d+"),
    ],
    ids=["short", "something else", "another release", "cut off"],
)
def test_memory_that_is_no_replay_of_this_release_is_refused(changed, why) -> None:
    layout = Layout(10, X)
    assert Layout.read(memoryview(layout.head().ljust(layout.segment_bytes, b"\0")), "a") == layout
    with pytest.raises(ProtocolMismatch, match=why):
        Layout.read(memoryview(changed(layout.head())), "a")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (lambda file: file[:19], "is no saved replay: it is only 19 bytes long"),
        (lambda file: file[:20], "the head of .* is damaged"),
        (lambda file: b"?" + file[1:], "is no saved replay: expected it to begin with"),
        (other_version, r"has format version \d+, this release reads version \d+"),
    ],
    ids=["short", "a head alone", "something else", "another release"],
)
def test_a_file_that_is_no_saved_replay_of_this_release_is_refused(make, tmp_path, changed, why) -> None:
    path = tmp_path / "saved"
    make(10).save(path)
    path.write_bytes(changed(path.read_bytes()))
    descriptors = open_files()
    for recover in (False, True):
        with pytest.raises(Damaged, match=why):
            Replay.load(path, "refused", recover=recover)
    assert open_files() == descriptors


def test_a_codec_that_nobody_knows_is_refused_with_those_there_are(make, tmp_path) -> None:
    with pytest.raises(ValueError, match="codec 'gzip' is unknown: expected one of none, lz4, zstd"):
        make(10).save(tmp_path / "saved", codec="gzip")
    assert not list(tmp_path.iterdir())


def test_rows_are_reserved_from_one_to_all(make) -> None:
    replay = make(4)
    for n in (0, 5, -1):
        with pytest.raises(SpecMismatch, match=f"cannot reserve {n} rows: expected 1 to 4"):
            replay.reserve(n)
    for n in (1, 4):
        with replay.reserve(n) as rows:
            assert len(rows) == n
            rows["n"] = n
            with pytest.raises(SpecMismatch, match="field 'y' cannot be written in place; expected one of x, n"):
                rows["y"]
    assert replay.sample(4, replace=False)["n"].tolist() == [4] * 4
    assert replay.added == 5


def test_rows_that_another_reservation_holds_are_not_reserved_again(make) -> None:
    replay = make(4)
    with replay.reserve(2):
        replay.reserve(2).abandon()
        with pytest.raises(Busy, match="no 3 free slots side by side"):
            replay.reserve(3)
    replay.reserve(3).abandon()


@pytest.mark.parametrize("options", [{"full": "block"}, {"full": "drop_newest"}, {"limiter": RateLimiter(1.0)}])
def test_rows_are_reserved_where_nothing_waits_for_readers(make, options) -> None:
    replay = make(4, **options)
    with pytest.raises(Refused, match="full='overwrite' and no rate limiter; use add"):
        replay.reserve(1)


def test_a_batch_knows_its_columns(make) -> None:
    batch = make(4).batch(2)
    assert len(batch) == 2 and list(batch) == ["x", "n"]
    with pytest.raises(KeyError, match="'y': this batch has x, n"):
        batch["y"]


def test_at_least_one_batch_is_drawn_ahead(make) -> None:
    replay = make(4)
    replay.add(x=np.zeros(3), n=5)
    with pytest.raises(ValueError, match="depth=0: expected at least one batch ahead"):
        replay.prefetch(1, depth=0)
    with replay.prefetch(1, depth=1) as batches:
        assert next(batches)["n"].tolist() == [5]


@pytest.mark.parametrize(
    ("options", "windows", "why"),
    [
        ({}, {"next": ("x",)}, "make it with episodes=Episodes"),
        ({"episodes": Episodes(terminated="end")}, {"next": ("y",)}, "there is no field 'y'; expected some of x, end"),
        ({"episodes": Episodes(terminated="end")}, {"n_step": 2}, r"episodes=Episodes\(reward=...\)"),
    ],
)
def test_windows_that_the_rows_do_not_have_are_refused(make, options, windows, why) -> None:
    replay = make(4, {"x": Field(()), "end": Field((), "bool")}, **options)
    with pytest.raises(SpecMismatch, match=why):
        replay.batch(2, Windows(**windows))


def test_where_the_disk_is_full_no_file_stays(tmp_path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    path, descriptors = tmp_path / "rows", open_files()
    with pytest.raises(SharedMemoryError, match="No space left on device; make room or ask for fewer rows"):
        Replay.create(path, 10, X)
    assert not path.exists()
    assert open_files() == descriptors


def test_where_there_is_no_file_one_is_told_how_it_is_made(tmp_path) -> None:
    with pytest.raises(SharedMemoryError, match=r"No such file or directory; make it with Replay.create\(Path"):
        Replay.attach(Path(tmp_path / "rows"))


def test_a_save_that_goes_on_says_so(make, tmp_path, monkeypatch) -> None:
    replay, go, save = make(10), threading.Event(), Replay.save

    def later(*given: Any, **options: Any) -> Any:
        assert go.wait(60)
        return save(*given, **options)

    monkeypatch.setattr(Replay, "save", later)
    saving = replay.save_in_background(tmp_path / "saved")
    with pytest.raises(TimeoutError, match="still running after 0.0 s; ask again"):
        saving.result(0.0)
    assert not saving.done()
    go.set()
    assert saving.result(60).path == tmp_path / "saved"
    assert saving.done()


def test_it_shows_its_name_rows_and_fields(make) -> None:
    replay = make(10)
    replay.add(x=np.zeros(3), n=1)
    assert repr(replay).startswith("Replay('test-")
    assert repr(replay).endswith("', 1 of 10 rows, x: float32[3], n: int64[])")
