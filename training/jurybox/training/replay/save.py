"""Saving a replay while writers go on.

The state that is saved is that of the moment when saving began: every row whose ticket was handed out by then and
that is whole when the saver comes to it. Rows are copied and verified like a sample, so none is torn, and none is newer
than that moment; a row that is overwritten before the saver reaches it is left out (its successor belongs to the next
save). The saver goes from the oldest row to the newest, in the order in which writers overwrite.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox import native
from jurybox.protocol.errors import Refused
from jurybox.protocol.locks import NESTED
from jurybox.training.replay.archive import CODECS, RECORD_BYTES, ItemKind, Saved, head_of, record_head
from jurybox.training.replay.options import ForkGuard
from jurybox.training.replay.part import Part, Parts, standing_of

# A chunk stays in a core's second-level cache between its copy, its compression and its checksum.
CHUNK_BYTES = 512 << 10
# Chunks that a thread packs and writes at once, without the interpreter in between.
_CHUNKS_A_BATCH = 16
# Bytes that may wait before write-back begins, so that fsync has little left to do.
_WRITEBACK_BYTES = 32 << 20
# After chunks that did not shrink, stop compressing; try again after this many.
_RETRY_EVERY = 16


class _Output:
    """A file to which many threads append records, with a thread that writes."""

    def __init__(self, fd: int, at: int) -> None:
        self.fd = fd
        self.at = at
        self._lock = threading.Lock()
        self._unsynced = 0
        self._work = threading.Event()
        self._closing = threading.Event()
        self._error: OSError | None = None
        self._flusher = threading.Thread(target=self._flush, name="replay-writeback", daemon=True)
        self._flusher.start()

    def write(self, *records: Any) -> None:
        views = [memoryview(record).cast("B") for record in records]
        size = sum(view.nbytes for view in views)
        with self._lock:
            at, self.at = self.at, self.at + size
            self._unsynced += size
            due = self._unsynced >= _WRITEBACK_BYTES
            if due:
                self._unsynced = 0
        while views:
            done = os.pwritev(self.fd, views, at)
            at += done
            while views and done >= views[0].nbytes:
                done -= views.pop(0).nbytes
            if views:
                views[0] = views[0][done:]
        if due:
            self._work.set()

    def finish(self) -> None:
        self._closing.set()
        self._work.set()
        self._flusher.join()
        if self._error is not None:
            raise self._error
        os.fsync(self.fd)

    def _flush(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            if self._closing.is_set():
                return
            try:
                native.start_writing(self.fd)
            except OSError as error:
                self._error = error
                return


class _Compressor:
    """Compresses data, unless recent data was not compressible."""

    def __init__(self, codec: str) -> None:
        self._compress: Callable[[memoryview], bytes]
        if codec == "lz4":
            from lz4 import block

            self._compress = partial(block.compress, store_size=False)
        elif codec == "zstd":
            import zstandard

            self._compress = lambda data: zstandard.ZstdCompressor(level=1, write_content_size=True).compress(data)
        elif codec != "none":
            raise ValueError(f"codec {codec!r} is unknown: expected one of {', '.join(CODECS)}")
        self._number = CODECS.index(codec)
        self._incompressible = 0
        self._turn = count()

    def __call__(self, data: memoryview) -> tuple[int, Any]:
        if self._number == 0 or (self._incompressible > 4 and next(self._turn) % _RETRY_EVERY):
            return 0, data
        small = self._compress(data)
        if memoryview(small).nbytes > 0.9 * data.nbytes:
            self._incompressible += 1
            return 0, data
        self._incompressible = 0
        return self._number, small


@dataclass(frozen=True, slots=True)
class _SaveJob:
    output: _Output
    codec: str
    compress: _Compressor
    pool: ThreadPoolExecutor


_here = threading.local()  # `saving`: whether a save is under way in this thread


@contextmanager
def one_in_this_thread() -> Iterator[None]:
    """Refuse a save within another one of this thread, of any replay: it would wait for locks of the standard library's
    thread pool that the outer one has."""
    if getattr(_here, "saving", False):
        raise Refused(f"a save is under way in this thread: {NESTED}; save afterwards")
    _here.saving = True
    try:
        yield
    finally:
        _here.saving = False


def save(replay: Parts, path: Path, *, before: Saved | None, codec: str) -> Saved:
    """Write a replay to `path`, fsync included.

    Args:
        before: a save to append to: only what changed since is written. Its file must be as it was left. None, or a
            save to another path: all is written.
        codec: "lz4", "zstd" or "none", chunk by chunk on all cores.

    Returns:
        What was written. A full save appears under its name when it is whole (written beside it, then renamed).
    """
    started = time.perf_counter()
    if before is not None and (before.path != path or not path.exists()):
        before = None
    if before is not None and path.stat().st_size != before.bytes:
        raise Refused(
            f"{path} is not as the last save left it ({before.bytes} bytes); "
            "expected nobody else to write it; save in full"
        )
    saved = Saved(path)
    if before is not None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            saved.bytes = _write(replay, fd, before.bytes, codec, before=before, saved=saved)
        except BaseException:
            os.ftruncate(fd, before.bytes)
            raise
        finally:
            os.close(fd)
    else:
        beside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
        fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            head = head_of(replay.layout)
            os.pwrite(fd, head, 0)
            saved.bytes = _write(replay, fd, len(head), codec, before=None, saved=saved)
            beside.replace(path)
            _sync_folder(path.parent)
        except BaseException:
            with suppress(FileNotFoundError):
                beside.unlink()
            raise
        finally:
            os.close(fd)
    saved.seconds = time.perf_counter() - started
    return saved


def _write(replay: Parts, fd: int, at: int, codec: str, *, before: Saved | None, saved: Saved) -> int:
    output = _Output(fd, at)
    try:
        counters = []
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="replay-save") as pool:
            job = _SaveJob(output, codec, _Compressor(codec), pool)
            for number, part in enumerate(replay.parts):
                standing = standing_of(part)
                newest = standing["reserved"]
                counters.append(standing)
                saved.rows += _write_part(job, part, number, newest, before=before, saved=saved)
    finally:
        output.finish()
    # Write the commit when all else is on the disk, so that readers can trust the records before it.
    payload = json.dumps({"parts": counters, "rows": saved.rows, "time": time.time()}).encode()
    output_at = output.at
    head = record_head(ItemKind.COMMIT, payload, part=0, codec=0, first=0, rows=0, raw_bytes=len(payload))
    os.pwrite(fd, head + payload, output_at)
    os.fsync(fd)
    return output_at + len(head) + len(payload)


def _write_part(to: _SaveJob, part: Part, number: int, newest: int, *, before: Saved | None, saved: Saved) -> int:
    size = part.layout.slot.size
    known = np.zeros(part.capacity, np.uint64)
    # Links are read before the rows: a link may then name a row that is not in the file, never the other way round.
    links = None if part.links is None else part.links.copy()
    last_links = before.links[number] if before is not None else None
    stale = part.sequences != before.sequences[number] if before is not None else part.sequences != 0
    if before is not None and links is not None and last_links is not None:
        stale |= (links != last_links).any(axis=1)
    local = threading.local()

    def buffer(nbytes: int) -> npt.NDArray[np.uint8]:
        if len(getattr(local, "buffer", ())) < nbytes:
            local.buffer = np.empty(nbytes, np.uint8)
        chunk: npt.NDArray[np.uint8] = local.buffer[:nbytes]
        return chunk

    def packed(runs: list[tuple[int, int]]) -> int:
        room = buffer(sum(n for _, n in runs) * size + len(runs) * RECORD_BYTES)
        table = np.array(runs, np.uint64)
        nbytes, whole = native.replay_pack(part.ring, table, number, newest, to.codec == "lz4", room, known)
        to.output.write(room[:nbytes])
        return whole

    def write(kind: ItemKind, raw: npt.NDArray[np.uint8], first: int, n: int) -> None:
        codec, payload = to.compress(raw.data)
        to.output.write(
            record_head(kind, payload, part=number, codec=codec, first=first, rows=n, raw_bytes=raw.nbytes), payload
        )

    def rows(first: int, n: int) -> int:
        raw = buffer(n * size)
        whole = native.replay_snapshot(part.ring, first, raw, newest)
        known[first : first + n] = raw.reshape(n, size)[:, :8].view(np.uint64)[:, 0]
        write(ItemKind.ROWS, raw, first, n)
        return whole

    def beside(kind: ItemKind, array: npt.NDArray[Any], first: int, n: int) -> int:
        write(kind, np.ascontiguousarray(array[first : first + n]).reshape(-1).view(np.uint8), first, n)
        return 0

    jobs: list[Future[int]] = []
    oldest = max(0, newest - part.capacity) % part.capacity
    chunks = _runs(stale, oldest, max(1, CHUNK_BYTES // size))
    if to.codec == "zstd":
        jobs.extend(to.pool.submit(rows, first, n) for first, n in chunks)
    else:
        while batch := list(islice(chunks, _CHUNKS_A_BATCH)):
            jobs.append(to.pool.submit(packed, batch))
    if links is not None:
        changed = np.ones(part.capacity, bool) if last_links is None else (links != last_links).any(axis=1)
        jobs.extend(
            to.pool.submit(beside, ItemKind.LINKS, links, first, n) for first, n in _runs(changed, 0, CHUNK_BYTES // 16)
        )
    if part.leaves is not None:
        every = np.ones(part.capacity, bool)
        leaves = part.leaves
        jobs.extend(
            to.pool.submit(beside, ItemKind.PRIORITIES, leaves, first, n)
            for first, n in _runs(every, 0, CHUNK_BYTES // 8)
        )
    try:
        total = sum(job.result() for job in jobs)
    except BaseException:
        for job in jobs:
            job.cancel()
        raise
    if before is not None:
        known = np.where(stale, known, before.sequences[number])
    saved.sequences.append(known)
    saved.links.append(links)
    return total


def _runs(wanted: npt.NDArray[np.bool_], start: int, longest: int) -> Iterator[tuple[int, int]]:
    """Runs (first, length) of the wanted slots, at most `longest` long, from slot `start` on and around the end."""
    for low, high in ((start, len(wanted)), (0, start)):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], wanted[low:high].astype(np.int8), [0]))))
        for first, end in zip(edges[::2] + low, edges[1::2] + low, strict=True):
            for at in range(int(first), int(end), longest):
                yield at, min(longest, int(end) - at)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class BackgroundSave(ForkGuard):
    """A save on a thread of its own; writers and samplers go on."""

    refusal = "this save runs on a thread of the process before its fork: ask there, or save in this one"

    def __init__(self, save: Callable[[], Saved]) -> None:
        thread = ThreadPoolExecutor(1, thread_name_prefix="replay-save")
        self._saving = thread.submit(save)
        thread.shutdown(wait=False)
        super().__init__()

    def done(self) -> bool:
        """Whether the save has ended. Raises Refused in a forked child."""
        self._check_process()
        return self._saving.done()

    def result(self, timeout: float | None = None) -> Saved:
        """Wait for the end of the save; raises its exception, TimeoutError, or Refused in a forked child."""
        self._check_process()
        if not wait((self._saving,), timeout).done:
            raise TimeoutError(f"the save is still running after {timeout} s; ask again")
        return self._saving.result()
