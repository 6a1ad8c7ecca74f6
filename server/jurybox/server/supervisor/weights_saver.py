"""Saved publications: every Kth as a safetensors file; after a restart the last one is published again.

A folder holds ``weights-<version>.safetensors`` and ``manifest.json``, which lists them with their checksums. Each is
written to a temporary file, synced and renamed, the manifest last, so every file in the manifest is complete even after
a power failure. Only one process at a time uses a folder; the kernel drops its lock however that process ends.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from jurybox.protocol.errors import Error, Refused, SpecMismatch, Timeout, said
from jurybox.protocol.weights import WeightsChannel
from jurybox.protocol.weights.channel import decode_extra, encode_extra
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import WeightsReader
from jurybox.server import safetensors_file
from jurybox.server.safetensors_file import DamagedFile
from jurybox.server.supervisor.models import HeldModel

log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_LOCK = ".lock"
_ASIDE = ".aside"
_Written = TypeVar("_Written")


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """One row of the manifest.

    Attributes:
        saved_at: seconds since 1970.
        extra: the values published with the weights, for display; arrays as dtype and shape (the file has them whole).
    """

    version: int
    file: str
    sha256: str
    layout_hash: str
    saved_at: float
    extra: dict[str, Any] = field(default_factory=dict)


class WeightsFiles:
    """Saves publications of one channel in a folder, which it locks until it is closed.

    Args:
        channel: the weights channel.
        folder: created if it is missing. Incomplete files of a killed writer are removed.
        every: save the first publication that is at least this many versions after the last one saved.
        keep: the number of files kept; older ones are removed.

    Raises:
        SpecMismatch: the channel has a dtype that safetensors cannot hold (complex128).
        Refused: another process, or another object of this one, uses the folder.
        ValueError: `every` or `keep` below 1.
    """

    def __init__(self, channel: WeightsChannel, folder: Path, *, every: int = 1, keep: int = 3) -> None:
        if every < 1 or keep < 1:
            raise ValueError(f"expected every >= 1 and keep >= 1, got every={every}, keep={keep}")
        if name := safetensors_file.unsaveable(channel.layout):
            raise SpecMismatch(
                f"tensor {name!r} is {channel.layout.places[name].dtype}, which safetensors cannot store: "
                "remove save_dir"
            )
        self.channel, self.folder, self.every, self.keep = channel, Path(folder), every, keep
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _hold(self.folder)
        try:
            self.saved = self._manifest()
            self._remove_leftovers()
        except BaseException:
            self.close()
            raise
        self.last_version = self.saved[-1].version if self.saved else 0
        self._reader = WeightsReader(channel)
        self._flat: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def due(self) -> bool:
        """Return whether `every` versions have been published since the last one saved. Costs one load from memory."""
        newest = self.channel.newest
        return newest >= self.last_version + self.every or (newest > 0 and not self.saved)

    def save_if_due(self) -> int | None:
        """Save the newest publication if one is due, and return its version. May block on the disk.

        Raises:
            Timeout: no version could be read whole in time, because the publisher was writing.
            OSError: the folder cannot be written to; the previous file and manifest are unchanged.
        """
        return self.save() if self.due() else None

    def save(self, timeout: float = 1.0) -> int:
        """Save the newest publication now, and return its version."""
        layout = self.channel.layout
        if self._flat is None:
            self._flat = np.empty(layout.nbytes, np.uint8)
        flat = self._flat
        version, extra = self._reader.read_flat(flat, timeout=timeout)
        metadata = {
            "jurybox.version": str(version),
            "jurybox.layout": layout.to_json().decode(),
            "jurybox.extra": base64.b64encode(encode_extra(extra)).decode(),
        }
        name = f"weights-{version:012d}.safetensors"
        sha256 = _write_whole(self.folder / name, lambda file: safetensors_file.write(file, layout, flat, metadata))
        row = SavedWeights(version, name, sha256, layout.hash, time.time(), _described(extra))
        rows = [saved for saved in self.saved if saved.file != name] + [row]
        old, kept = rows[: -self.keep], rows[-self.keep :]
        manifest = json.dumps({"files": [asdict(saved) for saved in kept]}, indent=1).encode()
        _write_whole(self.folder / _MANIFEST, lambda file: file.write(manifest))
        self.saved, self.last_version = kept, version
        for saved in old:
            (self.folder / saved.file).unlink(missing_ok=True)
        return version

    def restore(self, publisher: Publisher) -> int | None:
        """Publish the last saved weights with their own version and return it; None if nothing was saved.

        A damaged file is skipped with a warning, and the one before it is used. Later versions continue from the
        restored one.

        Raises:
            SpecMismatch: the saved weights have another layout; the message names the difference.
            Error: there are files and all are damaged; only an operator may decide to replace them.
        """
        damaged: list[Path] = []
        for saved in reversed(self.saved):
            path = self.folder / saved.file
            try:
                layout, state, metadata = safetensors_file.read(path, saved.sha256)
                extra = decode_extra(base64.b64decode(metadata.get("jurybox.extra", "")))
            except (OSError, Error, ValueError) as error:
                log.warning("weights file %s is passed over: %s", path, error)
                damaged.append(path)
                continue
            if difference := self.channel.layout.difference(layout):
                raise SpecMismatch(
                    f"{path} doesn't fit weights channel {self.channel.name}: {difference}; "
                    "restore it into the model it was saved from, or begin with an empty folder"
                )
            version = publisher.publish(state, extra, version=max(saved.version, self.channel.newest + 1))
            self._set_aside(damaged, saved)
            return version
        if self.saved:
            raise DamagedFile(
                f"every weights file in {self.folder} is damaged (the log names them); move the folder away to "
                "begin with the weights the model is loaded with"
            )
        return None

    def _set_aside(self, damaged: list[Path], restored: SavedWeights) -> None:
        """Rename damaged files that are newer than the restored one, and drop them from `saved`.

        Their versions will be saved again.
        """
        for path in damaged:
            with contextlib.suppress(FileNotFoundError):
                path.replace(path.with_name(f"{path.name}.damaged"))
        self.saved = [saved for saved in self.saved if saved.version <= restored.version]
        self.last_version = restored.version

    def close(self) -> None:
        """Unlock the folder. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _remove_leftovers(self) -> None:
        """Remove files that a killed writer left. The lock guarantees that no writer is running."""
        named = {saved.file for saved in self.saved}
        for path in [*self.folder.glob(f".*{_ASIDE}"), *self.folder.glob("weights-*.safetensors")]:
            if path.name not in named:
                path.unlink(missing_ok=True)

    def _manifest(self) -> list[SavedWeights]:
        path = self.folder / _MANIFEST
        if not path.exists():
            return []
        try:
            rows = [SavedWeights(**row) for row in json.loads(path.read_bytes())["files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise Error(f"{path} is no manifest of weights files ({error}); move it away to begin anew") from error
        return sorted(rows, key=lambda row: row.version)


def _hold(folder: Path) -> int:
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise Refused(
            f"{folder} is where another server keeps weights: stop that one, or give this one another save_dir"
        ) from error
    return fd


def _described(extra: dict[str, Any]) -> dict[str, Any]:
    return {
        key: f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else _plain(value)
        for key, value in extra.items()
    }


def _plain(value: Any) -> Any:
    try:
        json.dumps(value)
    except TypeError:
        return f"{type(value).__name__} of {len(value)}"  # a list or dict that contains arrays
    return value


def _write_whole(path: Path, fill: Callable[[IO[bytes]], _Written]) -> _Written:
    """Write a temporary file, sync it, rename it, sync the folder: a reader sees the old or the new file, complete."""
    aside = path.with_name(f".{path.name}{_ASIDE}")
    try:
        with aside.open("wb") as file:
            written = fill(file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    with _opened(path.parent) as folder:
        os.fsync(folder)
    return written


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


# Saving of published weights: one thread of the supervisor for all models.
#
# It reads channels as an actor does, so learners and engines are not involved, and it may block on the disk, which the
# supervisor's loop must not. Only the supervisor restores a channel from disk, before any engine reads it.


_LOOK = 0.1  # seconds between two checks of the channels, so at most the delay until a publication is saved
_LAST = 2.0  # seconds that the last save waits for a publisher in the middle of a snapshot


class WeightsSaver:
    """Saves publications of the models whose settings ask for it.

    Args:
        report: called with (event, fields) for what should be logged.
    """

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report
        self._files: dict[int, WeightsFiles] = {}  # by model
        self._held: dict[int, HeldModel] = {}
        self._failing: dict[int, str] = {}
        self._turn = threading.Lock()  # held while a file is written, so that `drop` waits for it
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, held: HeldModel) -> int | None:
        """Begin to save a model's publications, as its settings say, and restore its channel if it is empty.

        Returns:
            The version that was restored; None if none was.

        Raises:
            Error: another server uses the folder, or its files have another layout, or all are damaged.
            OSError: the folder cannot be created or opened.
        """
        settings, channel = held.asked, held.channel
        folder = Path(settings.save_dir) / held.name if settings.save_dir else None
        files = self._files.get(held.index)
        if files is not None and (files.channel is not channel or files.folder != folder):
            self.drop(held)
            files = None
        if channel is None or folder is None:
            return None
        restored = None
        if files is None:
            files = WeightsFiles(channel, folder, every=settings.save_every, keep=settings.save_keep)
            try:
                if channel.newest == 0:
                    with Publisher(channel) as publisher:
                        restored = files.restore(publisher)
            except BaseException:
                files.close()
                raise
        with self._turn:
            files.every, files.keep = settings.save_every, settings.save_keep
            self._files[held.index], self._held[held.index] = files, held
            held.saved = files.last_version
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weights_saver", daemon=True)
            self._thread.start()
        return restored

    def drop(self, held: HeldModel) -> None:
        """Save the newest publication of a model that is unloaded, and unlock its folder. No-op without a folder."""
        with self._turn:
            self._failing.pop(held.index, None)
            files = self._files.pop(held.index, None)
            if files is not None:
                self._finish(held.name, files)

    def close(self) -> None:
        """Stop the thread, save new publications, and unlock the folders."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for model, files in self._files.items():
            self._finish(self._held[model].name, files)
        self._files.clear()

    def _finish(self, name: str, files: WeightsFiles) -> None:
        try:
            if files.channel.newest > files.last_version:
                files.save(_LAST)
        except (Error, OSError) as error:
            self._report("weights not saved", model=name, folder=str(files.folder), error=str(error))
        finally:
            files.close()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK):
            for model in list(self._files):
                if self._stop.is_set():
                    return
                with self._turn:
                    if files := self._files.get(model):
                        try:
                            self._save(model, files)
                        except Exception as error:  # noqa: BLE001  one model's files must not end the others' saving
                            self._failed_to_save(model, files, said(error))

    def _save(self, model: int, files: WeightsFiles) -> None:
        """Save if due. A failed save is retried, and reported again only when its reason changes."""
        try:
            if (version := files.save_if_due()) is not None:
                self._held[model].saved = version
                self._failing.pop(model, None)
        except Timeout:
            pass  # the publisher is in the middle of a snapshot, or far ahead: try again at the next check
        except (Error, OSError) as error:
            self._failed_to_save(model, files, str(error))

    def _failed_to_save(self, model: int, files: WeightsFiles, why: str) -> None:
        if self._failing.get(model) != why:
            self._failing[model] = why
            self._report("weights not saved", model=self._held[model].name, folder=str(files.folder), error=why)
