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
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
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
from jurybox.server.settings.config import ModelSettings
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
        heir_of: files of another channel, without any saved, whose lock on the folder these share.

    Raises:
        SpecMismatch: the channel has a dtype that safetensors cannot hold (complex128).
        Refused: another process, or another object of this one, uses the folder.
        ValueError: `every` or `keep` below 1.
    """

    def __init__(
        self,
        channel: WeightsChannel,
        folder: Path,
        *,
        every: int = 1,
        keep: int = 3,
        heir_of: WeightsFiles | None = None,
    ) -> None:
        if every < 1 or keep < 1:
            raise ValueError(f"expected every >= 1 and keep >= 1, got every={every}, keep={keep}")
        if name := safetensors_file.unsaveable(channel.layout):
            raise SpecMismatch(
                f"tensor {name!r} is {channel.layout.places[name].dtype}, which safetensors cannot store: "
                "remove save_dir"
            )
        self.channel, self.folder, self.every, self.keep = channel, Path(folder), every, keep
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock: int = os.dup(heir_of._lock) if heir_of else _hold(self.folder)
        try:
            self.saved = self._manifest()
            self._remove_leftovers()
        except BaseException:
            self.close()
            raise
        self.last_version = 0  # of this channel; files that were there before may be of another run
        self._reader = WeightsReader(channel)
        self._flat: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def due(self) -> bool:
        """Return whether the first or `every` versions have been published since the last one saved or restored.

        Costs one load from memory.
        """
        return self.channel.newest >= (self.last_version + self.every if self.last_version else 1)

    def save(self, timeout: float = 1.0) -> int:
        """Save the newest publication now, and return its version. May block on the disk.

        Raises:
            Timeout: no version could be read whole in time, because the publisher was writing.
            OSError: the folder cannot be written to; the previous file and manifest are unchanged.
        """
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
        for number, saved in reversed(list(enumerate(self.saved))):
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
            version = publisher.restore(state, extra, max(saved.version, self.channel.newest + 1))
            self._set_aside(damaged, number)
            return version
        if self.saved:
            raise DamagedFile(
                f"every weights file in {self.folder} is damaged (the log names them); move the folder away to "
                "begin with the weights the model is loaded with"
            )
        return None

    def _set_aside(self, damaged: list[Path], restored: int) -> None:
        """Rename damaged files that are newer than the restored one, number `restored`, and drop them from `saved`.

        Their versions will be saved again.
        """
        for path in damaged:
            with contextlib.suppress(FileNotFoundError):
                path.replace(path.with_name(f"{path.name}.damaged"))
        self.saved = self.saved[: restored + 1]
        self.last_version = self.saved[-1].version

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
            return [SavedWeights(**row) for row in json.loads(path.read_bytes())["files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise Error(f"{path} is no manifest of weights files ({error}); move it away to begin anew") from error


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
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return written


# Saving of published weights: one thread of the supervisor for all models.
#
# It reads channels as an actor does, so learners and engines are not involved, and it may block on the disk, which the
# supervisor's loop must not. Only the supervisor restores a channel from disk, before any engine reads it.


_LOOK = 0.1  # seconds between two checks of the channels, so at most the delay until a publication is saved
_AGAIN = 5.0  # seconds until a failed save is repeated: the disk may be full, and each attempt fills what others need
_LAST = 2.0  # seconds that the last save waits for a publisher in the middle of a snapshot


@dataclass(slots=True)
class _Saving:
    """A model whose publications are saved."""

    held: HeldModel
    files: WeightsFiles
    failing: str = ""  # why the last save failed, as reported
    again: float = 0.0  # no save before then, s of the monotonic clock
    passed_on: bool = False  # its folder has passed to another channel, so it is not written to any more


class WeightsSaver:
    """Saves publications of the models whose settings ask for it. No method but `close` waits for a save.

    A load prepares the saving of its channel. That begins when the load serves and takes over; if it fails, it is
    discarded, and nothing has changed for the load in service.

    Args:
        report: called with (event, fields) for what should be logged.
    """

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report
        self._saving: dict[int, _Saving] = {}  # by model
        self._prepared: dict[tuple[WeightsChannel, Path], _Saving] = {}  # for loads that do not serve yet
        # What the thread does about models that are no longer saved, in this order; with the files that it ends.
        self._endings: deque[tuple[WeightsFiles | None, Callable[[], None]]] = deque()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def busy(self, held: HeldModel, settings: ModelSettings) -> bool:
        """Return whether the folder of a model's settings is still in use for a model that is no longer saved."""
        folder = _folder(held, settings)
        return any(files is not None and files.folder == folder for files, _ in tuple(self._endings))

    def prepare(self, held: HeldModel, channel: WeightsChannel | None, settings: ModelSettings) -> int | None:
        """Prepare to save the publications of a load, as its settings say, and restore its channel if it is empty.

        Must not be called while `busy`.

        Args:
            channel: the channel of the load; None: it takes no publications.

        Returns:
            The version that was restored; None if none was.

        Raises:
            Error: another server uses the folder, or its files have another layout, or all are damaged.
            OSError: the folder cannot be created or opened.
        """
        folder = _folder(held, settings)
        if channel is None or folder is None:
            return None
        there = [saving for saving in self._prepared.values() if saving.held is held]
        if (current := self._saving.get(held.index)) is not None:
            there.insert(0, current)
        there = [saving for saving in there if saving.files.folder == folder]
        for saving in there:
            if saving.files.channel is channel:
                saving.files.every, saving.files.keep = settings.save_every, settings.save_keep
                return None
        heir_of = there[0].files if there else None
        if heir_of is not None and (heir_of.saved or heir_of.channel.newest):
            raise SpecMismatch(
                f"{folder} keeps the weights of {held.name!r} as it is, which don't fit those to be loaded: "
                f"{channel.layout.difference(heir_of.channel.layout)}; expected another save_dir with them"
            )
        files = WeightsFiles(channel, folder, every=settings.save_every, keep=settings.save_keep, heir_of=heir_of)
        restored = None
        try:
            if channel.newest == 0:
                with Publisher(channel) as publisher:
                    restored = files.restore(publisher)
        except BaseException:
            files.close()
            raise
        self._prepared[channel, folder] = _Saving(held, files)
        return restored

    def take_over(self, held: HeldModel, channel: WeightsChannel | None, settings: ModelSettings) -> None:
        """Save the publications of a load from now on, as prepared, and no longer those of the load before it."""
        current, folder = self._saving.get(held.index), _folder(held, settings)
        if current is not None and current.files.channel is channel and current.files.folder == folder:
            return
        saving = self._prepared.pop((channel, folder), None) if channel is not None and folder is not None else None
        if current is not None:
            current.passed_on = saving is not None and current.files.folder == folder
            del self._saving[held.index]
            self._endings.append((current.files, partial(self._finish, current)))
        if saving is None:
            return
        self._saving[held.index] = saving
        held.saved = saving.files.last_version
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weights_saver", daemon=True)
            self._thread.start()

    def discard(self, held: HeldModel) -> None:
        """Unlock the folders that were prepared for loads of a model that have failed or are outdated."""
        wanted = [(placed.channel, _folder(held, held.orders[engine])) for engine, placed in held.placed.items()]
        for key, saving in list(self._prepared.items()):
            if saving.held is held and key not in wanted:
                del self._prepared[key]
                saving.files.close()

    def drop(self, held: HeldModel) -> None:
        """Save the newest publication of a model that is unloaded, and unlock its folder. No-op without a folder."""
        saving = self._saving.pop(held.index, None)
        if saving is not None:
            self._endings.append((saving.files, partial(self._finish, saving)))

    def release(self, channel: WeightsChannel) -> None:
        """Close a channel that no model has any more, after its last save."""
        if any(files is not None and files.channel is channel for files, _ in tuple(self._endings)):
            self._endings.append((None, channel.close))
        else:
            channel.close()

    def close(self, waiting: Callable[[], None] = lambda: None) -> None:
        """Save new publications, unlock the folders, and end the thread.

        Args:
            waiting: called several times a second until then.
        """
        self._stop.set()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_LOOK)
            waiting()
        for saving in self._prepared.values():
            saving.files.close()
        self._prepared.clear()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK):
            self._end()
            for model, saving in list(self._saving.items()):
                if self._stop.is_set():
                    break
                if (version := self._save(saving)) and self._saving.get(model) is saving:
                    saving.held.saved = version
        self._end()
        for saving in self._saving.values():
            self._finish(saving)
        self._saving.clear()

    def _end(self) -> None:
        while self._endings:
            self._endings[0][1]()
            self._endings.popleft()  # only now: until then the folder is `busy`

    def _finish(self, saving: _Saving) -> None:
        """Save the last publication, and unlock the folder. A failure is reported in any case."""
        files, saving.failing = saving.files, ""
        try:
            if files.channel.newest > files.last_version and not saving.passed_on:
                files.save(_LAST)
        except Exception as error:  # noqa: BLE001  one model's files must not end the others' saving
            self._failed_to_save(saving, error)
        finally:
            files.close()

    def _save(self, saving: _Saving) -> int:
        """Save if due, and return the version, else 0. A failed save is repeated after _AGAIN."""
        try:
            if time.monotonic() >= saving.again and saving.files.due() and not self._passes_on(saving):
                version = saving.files.save()
                saving.failing = ""
                return version
        except Timeout:
            pass  # the publisher is in the middle of a snapshot, or far ahead: try again at the next check
        except Exception as error:  # noqa: BLE001  one model's files must not end the others' saving
            self._failed_to_save(saving, error)
        return 0

    def _passes_on(self, saving: _Saving) -> bool:
        """Return whether the folder is about to pass to the channel of a load, which has found it without weights."""
        folder = saving.files.folder
        return any(one.held is saving.held and one.files.folder == folder for one in tuple(self._prepared.values()))

    def _failed_to_save(self, saving: _Saving, error: Exception) -> None:
        """Report why a save failed, unless the last one failed for the same reason."""
        saving.again = time.monotonic() + _AGAIN
        why = str(error) if isinstance(error, (Error, OSError)) else said(error)
        if saving.failing != why:
            saving.failing = why
            self._report("weights not saved", model=saving.held.name, folder=str(saving.files.folder), error=why)


def _folder(held: HeldModel, settings: ModelSettings) -> Path | None:
    """Return the folder in which a model's publications are saved with these settings."""
    return Path(settings.save_dir) / held.name if settings.save_dir else None
