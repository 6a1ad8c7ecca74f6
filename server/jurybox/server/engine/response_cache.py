"""A cache of rows that a deterministic model has computed: the same row and weights have the same outputs."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.arena import Columns
from jurybox.protocol.spec import TensorSpec
from jurybox.server.engine.served import BatchOutcome

_ENTRY_BYTES = 256  # of Python's objects, for each row


class Computes(Protocol):
    """What a cache asks of a served model; see `Served`."""

    @property
    def version(self) -> int: ...

    def run(self, tickets: NDArray[Any], rows: int, version: int = 0) -> BatchOutcome | None: ...


class _Column:
    """One tensor's rows in the arena, as bytes; those that differ in size with their extents."""

    def __init__(self, spec: TensorSpec, rows: NDArray[Any], extents: NDArray[np.int64] | None) -> None:
        self._spec = spec
        self._bytes = rows.reshape(len(rows), -1).view(np.uint8)
        self._extents = extents
        self._head: int = 0 if extents is None else spec.extents * 8

    def get(self, row: int) -> bytes | None:
        """Return a row's bytes; None if its extents are invalid."""
        if self._extents is None:
            whole: bytes = self._bytes[row].tobytes()
            return whole
        extents = self._extents[row].copy()  # once: a client might change them
        size = self._size(extents)
        return None if size < 0 else extents.tobytes() + self._bytes[row, :size].tobytes()

    def put(self, row: int, kept: bytes, at: int) -> int:
        """Write a row's bytes, which begin at `at`; return where they end."""
        size: int = self._bytes.shape[1]
        if self._extents is not None:
            extents = np.frombuffer(kept, np.int64, self._spec.extents, at)
            self._extents[row] = extents
            at, size = at + self._head, self._size(extents)
        self._bytes[row, :size] = np.frombuffer(kept, np.uint8, size, at)
        return at + size

    def _size(self, extents: NDArray[np.int64]) -> int:
        sizes: list[int] = extents.tolist()
        if min(sizes) < 0 or (count := math.prod(sizes) * self._spec.unit) > self._spec.capacity:
            return -1
        return count * int(self._spec.numpy_dtype.itemsize)


class ResponseCache:
    """The outputs of rows, by the row's inputs and the version of the weights; the least recently used are dropped.

    A key is a cryptographic hash, so that no other row has it.

    Args:
        served: the model. Its outputs depend on nothing but a row and the weights.
        columns: its rows in the arena.
        limit: bytes of all entries together.

    Attributes:
        hits, misses: rows that were answered from the cache, and rows that were computed.
        size: the bytes of all entries.
    """

    def __init__(self, served: Computes, columns: Columns, limit: int) -> None:
        self._served = served
        self._limit = limit
        spec = columns.spec
        self._inputs = [
            _Column(one, columns.inputs[name], columns.input_extents.get(name)) for name, one in spec.inputs.items()
        ]
        self._outputs = [
            _Column(one, columns.outputs[name], columns.output_extents.get(name)) for name, one in spec.outputs.items()
        ]
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self.hits = self.misses = self.size = 0

    def answer(self, tickets: NDArray[Any]) -> NDArray[np.bool_] | None:
        """Write the outputs of tickets all of whose rows are known; return which those are, None: none of them.

        The others, and those that ask for another version than the one in use, are for a batch.
        """
        known: NDArray[np.bool_] = np.zeros(len(tickets), np.bool_)
        if not self._kept:
            return None
        used = self._served.version
        for i, (first, rows, version) in enumerate(
            zip(tickets["first"].tolist(), tickets["rows"].tolist(), tickets["version"].tolist(), strict=True)
        ):
            if version in (0, used):
                found = self._found(used, range(first, first + rows))
                if found is not None:
                    known[i] = True
                    self.hits += rows
                    for row, kept in found:
                        self._write(row, kept)
        return known if known.any() else None

    def run(self, tickets: NDArray[Any], rows: int, version: int) -> BatchOutcome | None:
        """Do the same as `Served.run`, and compute only the rows that are not known."""
        used = version or self._served.version
        places = [
            row
            for first, n in zip(tickets["first"].tolist(), tickets["rows"].tolist(), strict=True)
            for row in range(first, first + n)
        ]
        keys = [self._key(used, row) for row in places]
        found = [None if key is None else self._kept.get(key) for key in keys]
        missing = [i for i, kept in enumerate(found) if kept is None]
        outcome = None
        if len(missing) == rows:
            outcome = self._served.run(tickets, rows, version)
        elif missing:
            outcome = self._served.run(_parts(tickets, found), len(missing), version)
            # Failed rows are named by their places in the whole batch; and no answer has rows of two versions.
            if outcome is not None or (version or self._served.version) != used:
                missing, found = list(range(rows)), [None] * rows
                outcome = self._served.run(tickets, rows, version)
        for row, kept in zip(places, found, strict=True):
            if kept is not None:
                self._write(row, kept)
        self.misses += len(missing)
        self.hits += rows - len(missing)
        if outcome is None and (version or self._served.version) == used:
            for i in missing:
                # Unless the client has changed the row since, in which case it is not known what was computed.
                if (key := keys[i]) is not None and self._key(used, places[i]) == key:
                    self._keep(key, places[i])
        return outcome

    def _found(self, version: int, rows: range) -> list[tuple[int, bytes]] | None:
        found = []
        for row in rows:
            key = self._key(version, row)
            kept = None if key is None else self._kept.get(key)
            if key is None or kept is None:
                return None
            self._kept.move_to_end(key)
            found.append((row, kept))
        return found

    def _key(self, version: int, row: int) -> bytes | None:
        made = hashlib.blake2b(version.to_bytes(8, "little"), digest_size=32)
        for column in self._inputs:  # the lengths follow from the spec, or from the extents before the bytes
            given = column.get(row)
            if given is None:
                return None
            made.update(given)
        return made.digest()

    def _keep(self, key: bytes, row: int) -> None:
        parts = [column.get(row) for column in self._outputs]
        kept = b"".join(part for part in parts if part is not None)
        size = len(kept) + _ENTRY_BYTES
        if None in parts or key in self._kept or size > self._limit:
            return
        self._kept[key] = kept
        self.size += size
        while self.size > self._limit:
            _, dropped = self._kept.popitem(last=False)
            self.size -= len(dropped) + _ENTRY_BYTES

    def _write(self, row: int, kept: bytes) -> None:
        at = 0
        for column in self._outputs:
            at = column.put(row, kept, at)


def _parts(tickets: NDArray[Any], found: list[bytes | None]) -> NDArray[Any]:
    """Return tickets for the rows of a batch that were not found: one for each run of them in a ticket."""
    numbers, firsts, counts = [], [], []
    at = 0
    for number, (first, rows) in enumerate(zip(tickets["first"].tolist(), tickets["rows"].tolist(), strict=True)):
        begins = True
        for row in range(rows):
            if found[at + row] is not None:
                begins = True
            elif begins:
                numbers.append(number)
                firsts.append(first + row)
                counts.append(1)
                begins = False
            else:
                counts[-1] += 1
        at += rows
    parts = tickets[numbers].copy()
    parts["first"], parts["rows"] = firsts, counts
    return parts
