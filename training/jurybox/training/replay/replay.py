"""Replay: a ring of transitions in shared memory that many processes fill and others sample, without a lock."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jurybox import native
from jurybox.protocol import forks
from jurybox.protocol.errors import Refused, SpecMismatch, Timeout
from jurybox.protocol.locks import TimedLock, seconds
from jurybox.protocol.segment import Segment
from jurybox.training.replay import load as loading
from jurybox.training.replay import save as saving
from jurybox.training.replay.batch import Batch, Prefetch
from jurybox.training.replay.layout import Layout
from jurybox.training.replay.options import (
    FINITE_ERRORS,
    Episodes,
    Field,
    FullMode,
    NotEnoughRows,
    RateLimiter,
    Windows,
)
from jurybox.training.replay.part import (
    Counters,
    Part,
    check_name,
    format_parts,
    join_segment,
    new_segment,
    open_parts,
    path_of,
    share_segment,
)
from jurybox.training.replay.writers import Adding, Reservation, Streams

if TYPE_CHECKING:
    from jurybox.training.replay.archive import Saved
    from jurybox.training.replay.resident import Resident

_PLAIN = Windows()
_TIMEOUT = 10.0  # seconds
_PATIENCE = 600.0  # seconds to wait for another thread's save


class Replay:
    """A replay. `create` it, `attach` to an existing one, or `load` a saved one.

    Every method may be called from several threads at once, but rows of one episode stream come from one thread.
    A row costs its fields' stored sizes and a sequence word of 8 bytes.

    A forked child may go on with the replay of its parent, as if it had attached to it: its rows begin episodes of
    their own, its draws are seeded by the operating system (call `seed` there to have them repeatable), and leaving a
    ``with`` block there does not remove the replay. A reservation, a `prefetch` and a save in the background stay the
    parent's.

    Attributes:
        name: of the shared memory; or the path of the file that is the replay's memory.
        add: writes one row: ``replay.add(observation=..., reward=1.0)``. This and `extend` are the native functions
            themselves: a Python frame in between would double the price of a small row.
        extend: writes n rows, in order: every value has a leading dimension n.
        parts: the pool, and the anchor where there is one.
        saved: what the last `save` wrote; the next incremental one builds on it. None: it will write everything.
    """

    def __init__(
        self,
        segment: Segment,
        layout: Layout,
        *,
        name: str | Path,
        threads: int | None,
        seed: int | None,
        timeout: float,
    ) -> None:
        self.name = name
        self.layout = layout
        self._segment: Segment | None = segment
        self.parts = open_parts(segment, layout, threads=threads, seed=seed, timeout=seconds(timeout))
        self._pool = self.parts[0]
        self.saved: Saved | None = None
        self._saving = TimedLock("a save of this replay")
        self._streams: weakref.WeakSet[Streams] = weakref.WeakSet()
        self.add: Adding = self._pool.ring.add
        self.extend: Adding = self._pool.ring.extend
        forks.register(self)

    @classmethod
    def create(
        cls,
        name: str | Path,
        capacity: int,
        fields: Mapping[str, Field],
        *,
        prioritized: bool = False,
        alpha: float = 0.6,
        full: FullMode = "overwrite",
        episodes: Episodes | None = None,
        anchor: int = 0,
        limiter: RateLimiter | None = None,
        threads: int | None = None,
        seed: int | None = None,
        timeout: float = _TIMEOUT,
        populate: bool = False,
    ) -> Replay:
        """Make an empty replay of `capacity` rows in shared memory; it stays while any process has it open.

        Args:
            name: by which `attach` finds it; one user's replays have different names. A `Path`: that file, mapped, is
                the memory; it stays when its processes are gone.
            fields: the fields of a row, in the best order for the arguments of `add`.
            prioritized: keep priorities (T. Schaul et al., 2016, proportional variant).
            alpha: exponent of the priorities, 0 to 1.
            full: what a full replay does with a new row: "overwrite" the oldest, "block" until rows are taken or
                discarded, "drop_newest".
            episodes: link rows to those before and after them.
            anchor: rows of a second part that nothing overwrites; see `anchor` and `sample`.
            limiter: couples writers and samplers.
            threads: number of threads that copy large samples; None: one per core, at most four.
            seed: of this process's draws; None: from the operating system.
            timeout: maximum number of seconds that add and sample wait.
            populate: touch all memory now, instead of when a row is first written (seconds for gigabytes).

        Raises:
            SharedMemoryError: there is no room, or the name is taken.
            ValueError: the description contradicts itself; the message says where.
        """
        layout = Layout(
            capacity, dict(fields), prioritized, alpha, full, episodes and episodes.of(fields), anchor, limiter
        )
        where = check_name(name)
        with new_segment(where, layout.segment_bytes) as segment:
            format_parts(segment, layout)
            if populate:
                segment.populate()
            return cls(segment, layout, name=where, threads=threads, seed=seed, timeout=timeout)

    @classmethod
    def attach(
        cls,
        name: str | Path,
        *,
        threads: int | None = None,
        seed: int | None = None,
        timeout: float = _TIMEOUT,
        populate: bool = False,
    ) -> Replay:
        """Open a replay that another process has made; `populate` maps all its pages now, not one by one later.

        A file that no process has open is repaired first: rows that killed writers left unfinished are dropped.

        Raises:
            SharedMemoryError: there is none of that name.
            ProtocolMismatch: it was made by a release with another layout.
        """
        where = check_name(name)
        segment, left_alone = join_segment(where)
        try:
            layout = Layout.read(segment.buffer, str(name))
            if populate:
                segment.populate()
            replay = cls(segment, layout, name=where, threads=threads, seed=seed, timeout=timeout)
            if left_alone:
                loading.put_in_order(replay)
                share_segment(segment)
            return replay
        except BaseException:
            segment.close()
            raise

    def close(self) -> None:
        """Unmap the memory in this process. Arrays of reservations stay valid; the replay stays for others."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def unlink(self) -> None:
        """Remove the name: no process can attach any more, and the memory is freed when the last one closes."""
        path_of(self.name).unlink(missing_ok=True)

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        owned = self._segment is not None and self._segment.owned
        if owned:
            self.unlink()
        self.close()

    def reserve(self, rows: int) -> Reservation:
        """`rows` rows to be written in place: ``with replay.reserve(8) as r: r["observation"][:] = ...``."""
        return Reservation(self._pool, rows)

    def stream(self) -> Streams:
        """A writer of one environment's episodes."""
        return self._remembered(Streams(self._pool, 1, group=False))

    def streams(self, n: int) -> Streams:
        """A writer for n environments: `add` takes n rows, one for each."""
        return self._remembered(Streams(self._pool, n, group=True))

    def end_episode(self) -> None:
        """End the episode of the last row that this object's `add` or `extend` wrote."""
        self._pool.ring.end_episode()

    @property
    def anchor(self) -> Streams:
        """The writer of the permanent part (demonstrations, say); once full it drops rows.

        Raises:
            Refused: the replay was made without one.
        """
        if len(self.parts) == 1:
            raise Refused("this replay has no anchor: make it with anchor=<rows>")
        return self._remembered(Streams(self.parts[1], 1, group=False))

    def discard(self, rows: int) -> int:
        """Discard the `rows` oldest rows, to make room in a full replay that blocks or drops; returns their number."""
        return int(self._pool.ring.discard(rows))

    def batch(self, n: int, windows: Windows = _PLAIN, *, pinned: bool = False) -> Batch:
        """Reusable memory for samples of n rows; `pinned` page-locks it for copies to a GPU."""
        return Batch(self.layout, [part.ring for part in self.parts], n, windows, pinned=pinned)

    def sample(
        self,
        n: int,
        out: Batch | None = None,
        *,
        windows: Windows = _PLAIN,
        replace: bool = True,
        uniform: bool = False,
        beta: float = 0.4,
        anchor_ratio: float = 0.25,
        timeout: float | None = None,
    ) -> Batch:
        """Draw n rows with replacement: ten draws of a replay with one row give it ten times.

        Of an empty replay there are none, which is an error; the result is never None. `replace=False` draws different
        rows, and is an error with fewer than n. A row that is overwritten while it is copied is drawn again.

        Args:
            out: a batch of `batch()`, filled and given back; None: a new one. Its own windows count.
            windows: the rows to return around each row.
            replace: whether a row may be drawn twice.
            uniform: ignore the priorities of a prioritized replay.
            beta: exponent of the importance weights, 0 to 1.
            anchor_ratio: share of the rows that come from the anchor, if it has any rows.
            timeout: seconds to wait for the rate limiter. Defaults to the replay's.

        Raises:
            NotEnoughRows: the replay is empty, holds fewer rows than asked for without replacement, or none that
                fits the windows.
            Timeout: the rate limiter allowed no sample for `timeout` seconds.
            SpecMismatch: `out` was made by a replay with other fields, or for other episodes.
        """
        if out is None:
            batch = Batch(self.layout, [part.ring for part in self.parts], n, windows)
        else:
            batch = out
            if batch.layout is not self.layout:
                batch.check_layout(self.layout)
        prioritized = self.layout.prioritized and not uniform
        if prioritized and not replace:
            raise SpecMismatch("prioritized samples are drawn with replacement: give uniform=True with replace=False")
        if prioritized is False and batch.weights is not None:
            batch.weights[:n] = 1.0
        kept = self.parts[1] if len(self.parts) > 1 and self.parts[1].ring.size else None
        fixed = 0 if kept is None else n if not self._pool.ring.size else round(n * anchor_ratio)
        if fixed < n or n == 0:  # first, because only these rows are waited for
            self._draw(
                self._pool,
                batch.columns[0],
                n - fixed,
                fixed,
                replace=replace,
                prioritized=prioritized,
                beta=beta,
                timeout=timeout,
            )
        if kept is not None:
            self._draw(kept, batch.columns[1], fixed, 0, replace=replace, prioritized=prioritized, beta=beta)
        if prioritized and 0 < fixed < n:
            self._weigh_together(batch, n, fixed, beta)
        return batch

    def _draw(
        self,
        part: Part,
        columns: native.ReplayColumns,
        n: int,
        first: int,
        *,
        replace: bool,
        prioritized: bool,
        beta: float,
        timeout: float | None = None,
    ) -> None:
        """Draw n rows of a part into `columns` from position `first` on.

        Args:
            timeout: seconds to wait for the rate limiter; None: the ring's.

        Raises:
            NotEnoughRows: there are too few rows to draw.
            Timeout: the rate limiter allowed no sample.
        """
        ring = part.ring
        wait = ring.timeout if timeout is None else seconds(timeout)
        status = ring.sample(columns, n, first, replace, prioritized, beta, part.mark, wait)
        if status == 0:
            return
        rows, kind = ring.size, "anchor" if part.mark else "replay"
        if status < 0:
            raise Timeout(
                f"the rate limiter let no {n} rows be sampled within {wait} s ({ring.added} added); "
                "add more rows, or give a longer timeout"
            )
        if rows == 0:
            raise NotEnoughRows(f"the {kind} is empty: expected rows to sample {n} from; add some first")
        if not replace:
            raise NotEnoughRows(
                f"the {kind} cannot give {n} different rows: it holds {rows}, "
                f"and fewer may fit or be whole; ask for fewer{', or give a smaller anchor_ratio' if part.mark else ''}"
            )
        raise NotEnoughRows(
            f"the {kind} holds {rows} rows, and none could be handed out: each is being written, or its "
            "episode does not reach as far as the windows ask (the newest rows of running episodes never do). "
            + (
                "End the anchor's episodes, ask for shorter windows, or give anchor_ratio=0 to sample the others alone"
                if part.mark
                else "Add more rows, end their episodes, or ask for shorter windows"
            )
        )

    def _weigh_together(self, batch: Batch, n: int, fixed: int, beta: float) -> None:
        """Put the weights of both parts on one scale: (N P(i)) ** -beta, where P counts the share of the part, too.

        Each part's own are divided by their largest, which belongs to the least probable of its rows.
        """
        weights, indices = batch.weights, batch.indices
        assert weights is not None
        scales = []
        for part, rows in ((self.parts[1], slice(0, fixed)), (self._pool, slice(fixed, n))):
            assert part.leaves is not None
            rarest = int(indices[rows][weights[rows].argmax()]) - part.mark
            chance = float(part.leaves[rarest % part.capacity]) / max(1, part.ring.priority_sum)
            scales.append(((rows.stop - rows.start) / n * max(chance, 1e-12)) ** -beta)
        weights[:fixed] *= scales[0] / max(scales)
        weights[fixed:n] *= scales[1] / max(scales)

    def update_priorities(self, indices: npt.NDArray[np.int64], errors: npt.ArrayLike) -> int:
        """Set the priorities of rows to (|error| + 1e-6) ** alpha, from any process, while others add and sample.

        Args:
            indices: (n,) of a batch.
            errors: (n,) TD errors.

        Returns:
            How many rows were still there; the others have been overwritten and are counted as stale.

        Raises:
            SpecMismatch: an error is not finite as float32. No priority has been changed then.
        """
        with np.errstate(over="ignore"):  # refused below
            values = np.ascontiguousarray(errors, np.float32)
        if not np.isfinite(values).all():
            at = int(np.argmin(np.isfinite(values)))
            raise SpecMismatch(f"errors[{at}] is {values[at]}: {FINITE_ERRORS}")
        return sum(int(part.ring.update_priorities(indices, values, part.mark)) for part in self.parts)

    def prefetch(self, n: int, *, depth: int = 2, device: str | None = None, **options: Any) -> Prefetch:
        """Sample batches in advance on a thread, with device="cuda" on the device. Options as for `sample`."""
        given = options.pop("timeout", None)
        wait = self.parts[0].ring.timeout if given is None else given
        return Prefetch(self.batch, self.sample, n, depth=depth, device=device, timeout=wait, options=options)

    def resident(self, device: str, *, capacity: int | None = None, seed: int | None = None) -> Resident:
        """A copy of the rows in a device's memory, which samples there: see `jurybox.training.replay.resident`."""
        from jurybox.training.replay.resident import Resident

        return Resident(self, device, capacity=capacity or self.layout.capacity, seed=seed)

    def seed(self, seed: int) -> None:
        """Seed this process's random numbers: the same calls on the same rows draw the same."""
        for number, part in enumerate(self.parts):
            part.ring.seed(seed + number)

    def save(self, path: str | Path, *, incremental: bool = False, codec: str = "lz4") -> Saved:
        """Write all rows to a file while writers go on; see `jurybox.training.replay.save`.

        Saves of one replay come after each other.

        Raises:
            Refused: this is a signal handler or a destructor within a save; or the file is not as the last one left it.
            Timeout: another thread's save of this replay did not end.
        """
        with saving.one_in_this_thread(), self._saving.within(_PATIENCE):
            self.saved = saving.save(self, Path(path), before=self.saved if incremental else None, codec=codec)
            return self.saved

    def save_in_background(
        self, path: str | Path, *, incremental: bool = False, codec: str = "lz4"
    ) -> saving.BackgroundSave:
        """Save on a thread; ``.result()`` waits for it and raises its exception."""
        return saving.BackgroundSave(partial(self.save, path, incremental=incremental, codec=codec))

    @classmethod
    def load(
        cls,
        path: str | Path,
        name: str | Path,
        *,
        recover: bool = False,
        threads: int | None = None,
        seed: int | None = None,
    ) -> Replay:
        """Create a replay from a file of `save`; see `jurybox.training.replay.load`."""

        def opened(segment: Segment, layout: Layout, where: str | Path) -> Replay:
            return cls(segment, layout, name=where, threads=threads, seed=seed, timeout=_TIMEOUT)

        return loading.load(Path(path), name, opened, recover=recover)

    def restore(self, path: str | Path, *, recover: bool = False) -> None:
        """Replace the rows of this replay by those of a file; no other process may use it meanwhile.

        What this object and its streams add next begins new episodes, and its next incremental save writes everything.
        Streams and saves of other `Replay` objects do not know of it: make them anew.
        """
        loading.restore(self, Path(path), recover=recover, replacing=self._begin_anew)

    @property
    def capacity(self) -> int:
        """Rows that fit, anchor included."""
        return self.layout.capacity + self.layout.anchor

    @property
    def added(self) -> int:
        """Rows added since the replay was made, by all processes."""
        return sum(int(part.ring.added) for part in self.parts)

    def __len__(self) -> int:
        return sum(int(part.ring.size) for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory."""
        return self.layout.segment_bytes

    @property
    def counters(self) -> Counters:
        """Return the counters of rows since the replay was made."""
        return Counters.of(self.parts)

    def repair(self) -> None:
        """Recompute the sums of the priorities, after a process was killed while setting some; for an unused replay."""
        for part in self.parts:
            part.ring.rebuild_sums()

    def _remembered(self, streams: Streams) -> Streams:
        self._streams.add(streams)
        return streams

    def _begin_anew(self) -> None:
        # Tickets go on from those of the file. So a row added after it may have the ticket, and the sequence word, of
        # another row: one that the last save wrote, or one that a stream would take for its predecessor.
        self.saved = None
        self.end_episode()
        for streams in self._streams:
            streams.begin_anew()

    def _after_fork_in_child(self) -> None:
        for part in self.parts:
            part.ring.after_fork(secrets.randbits(63))
        self.saved = None  # the file goes on being the parent's
        self._saving.anew()
        if self._segment is not None:
            self._segment.separate(hold=True)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}: {spec.dtype}{list(spec.shape)}" for name, spec in self.layout.fields.items())
        return f"Replay({str(self.name)!r}, {len(self)} of {self.capacity} rows, {fields})"
