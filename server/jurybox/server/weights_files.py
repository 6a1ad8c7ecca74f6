"""Publications on disk: every Kth as a safetensors file, and the channel filled from the last one after a restart.

A folder holds ``weights-<version>.safetensors`` and ``manifest.json``, which names them with their checksums. Both are
written aside, synced and renamed, the manifest last: what the manifest names is whole, whenever the power went.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from jurybox.client.publisher import Publisher
from jurybox.client.weights_reader import WeightsReader
from jurybox.protocol.errors import Error, SpecMismatch
from jurybox.protocol.weights import WeightsChannel, WeightsLayout
from jurybox.protocol.weights.extra import decode, encode

log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_UNSAVEABLE = "complex128"  # the one dtype of the channel that safetensors has not


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """One row of the manifest. `saved_at` is seconds since the epoch."""

    version: int
    file: str
    sha256: str
    layout_hash: str
    saved_at: float


class WeightsFiles:
    """Keeps publications of one channel in a folder.

    Args:
        channel: whose publications.
        folder: made where it is missing.
        every: save the first publication that is this many versions after the last one saved.
        keep: so many files stay; older ones are removed.

    Raises:
        SpecMismatch: the channel has a dtype that safetensors cannot hold (complex128).
        ValueError: `every` or `keep` below 1.
    """

    def __init__(self, channel: WeightsChannel, folder: Path, *, every: int = 1, keep: int = 3) -> None:
        if every < 1 or keep < 1:
            raise ValueError(f"expected every >= 1 and keep >= 1, got every={every}, keep={keep}")
        if unsaveable := [name for name, place in channel.layout.places.items() if place.dtype == _UNSAVEABLE]:
            raise SpecMismatch(
                f"tensor {unsaveable[0]!r} is {_UNSAVEABLE}, which safetensors cannot hold: don't save these"
            )
        self.channel, self.folder, self.every, self.keep = channel, Path(folder), every, keep
        self.folder.mkdir(parents=True, exist_ok=True)
        self._reader = WeightsReader(channel)
        self._flat: torch.Tensor | None = None
        self.saved = self._manifest()
        self.last_version = self.saved[-1].version if self.saved else 0

    def due(self) -> bool:
        """Whether `every` versions have been published since the last one saved; cheap to ask after each batch."""
        newest = self.channel.newest
        return newest >= self.last_version + self.every or (newest > 0 and not self.saved)

    def save_if_due(self, timeout: float = 1.0) -> int | None:
        """Save the newest publication if one is due; gives its version. Belongs on a thread that may wait for a disk.

        Raises:
            Timeout: the publisher did not let a whole version be read in time.
            OSError: the folder cannot be written; the file and manifest of before still stand.
        """
        return self.save(timeout) if self.due() else None

    def save(self, timeout: float = 1.0) -> int:
        """Save the newest publication now; gives its version."""
        if self._flat is None:
            self._flat = torch.empty(self.channel.layout.nbytes, dtype=torch.uint8)
        flat = self._flat
        version, extra = self._reader.read_flat(flat.numpy(), timeout=timeout)
        tensors = {
            name: flat[place.offset : place.offset + place.nbytes].view(getattr(torch, place.dtype)).view(place.shape)
            for name, place in self.channel.layout.places.items()
        }
        metadata = {
            "jurybox.version": str(version),
            "jurybox.layout": self.channel.layout.to_json().decode(),
            "jurybox.extra": base64.b64encode(encode(extra)).decode(),
        }
        data = save(tensors, metadata)
        name = f"weights-{version:012d}.safetensors"
        _write_whole(self.folder / name, data)
        row = SavedWeights(version, name, hashlib.sha256(data).hexdigest(), self.channel.layout.hash, time.time())
        rows = [saved for saved in self.saved if saved.file != name] + [row]
        old, self.saved = rows[: -self.keep], rows[-self.keep :]
        _write_whole(
            self.folder / _MANIFEST, json.dumps({"files": [asdict(saved) for saved in self.saved]}, indent=1).encode()
        )
        for saved in old:
            (self.folder / saved.file).unlink(missing_ok=True)
        self.last_version = version
        return version

    def restore(self, publisher: Publisher) -> int | None:
        """Publish the last saved weights under their own version; None where nothing was saved.

        A file that is damaged is passed over, with a warning, for the one before it. Versions go on from the restored
        one, so that readers who have seen the former server's see new ones as newer.

        Raises:
            SpecMismatch: the saved weights are of another layout; the message names the difference.
        """
        for saved in reversed(self.saved):
            try:
                state, extra = load_weights(self.folder / saved.file, saved.sha256)
            except (OSError, Error, SafetensorError) as error:
                log.warning("weights file %s is passed over: %s", self.folder / saved.file, error)
                continue
            if difference := self.channel.layout.difference(WeightsLayout.of(state)):
                raise SpecMismatch(
                    f"{self.folder / saved.file} doesn't fit weights channel {self.channel.name}: {difference}; "
                    "restore it into the model it was saved from, or begin with an empty folder"
                )
            return publisher.publish(state, extra, version=max(saved.version, self.channel.newest + 1))
        return None

    def _manifest(self) -> list[SavedWeights]:
        path = self.folder / _MANIFEST
        if not path.exists():
            return []
        try:
            rows = [SavedWeights(**row) for row in json.loads(path.read_bytes())["files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise Error(f"{path} is no manifest of weights files ({error}); move it away to begin anew") from error
        return sorted(rows, key=lambda row: row.version)


def load_weights(path: Path, sha256: str | None = None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A saved file as tensors on the CPU, and the extra saved with them.

    Raises:
        Error: the file is not what `sha256` says.
        SafetensorError: it is no safetensors file.
    """
    data = path.read_bytes()
    if sha256 is not None and (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise Error(f"{path} is damaged: expected SHA-256 {sha256[:12]}..., got {found[:12]}...")
    state: dict[str, torch.Tensor] = load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return state, decode(base64.b64decode(header.get("__metadata__", {}).get("jurybox.extra", "")))


def _write_whole(path: Path, data: bytes) -> None:
    """Write aside, sync, rename, sync the folder: `path` is the old file or the whole new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
