"""Checkpoints of a training: folders that are created atomically, and the state files in them.

``checkpoints/step-000012000`` contains ``run.json`` (counters, as JSON) and the training's files: states
(``NAME.state``, see `write_state`), saved replays, weights. It is written under another name and renamed, so that a
crash, a kill or a full disk does not damage earlier checkpoints. ``checkpoints/best`` contains the weights with the
best evaluation; it cannot be resumed.

Nothing is ever unpickled: a state file contains JSON and raw arrays with a checksum.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jurybox.protocol.errors import ProtocolMismatch
from jurybox.protocol.weights.channel import decode_extra, encode_extra
from jurybox.training.errors import UsageError

__all__ = ["Checkpoint", "CheckpointError", "Checkpoints", "NoCheckpoint", "StateDamaged", "read_state", "write_state"]

DOCUMENT = "run.json"
EVALUATION = "evaluation.json"  # next to weights that were evaluated: their env steps, results and versions
_PREFIX = "step-"
_BEST = "best"
_WRITING = ".writing-"  # prefix of a folder that is not complete yet
_OLD = ".old-"  # prefix of a folder that is being replaced
_MAGIC = b"jbstate1"


class CheckpointError(UsageError, RuntimeError):
    """There is nothing to resume, or it does not match the run."""


class NoCheckpoint(CheckpointError):
    """There is no checkpoint yet."""


class StateDamaged(CheckpointError):
    """A file of a checkpoint is truncated, changed or missing."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        folder: its path.
        document: contents of its run.json.
    """

    folder: Path
    document: Mapping[str, Any]

    @property
    def env_steps(self) -> int:
        """Environment steps of the run when it was written."""
        return int(self.document["env_steps"])

    def state_path(self, name: str) -> Path | None:
        """Return the path of the state `name`; None if there is none."""
        path = self.folder / f"{name}.state"
        return path if path.exists() else None

    def state(self, name: str) -> dict[str, Any] | None:
        """Return the state `name`; None if there is none.

        Raises:
            StateDamaged: its file is damaged.
        """
        path = self.state_path(name)
        return read_state(path) if path else None


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: ``checkpoints/`` of the run; created when the first one is written.
        keep: number of newest checkpoints that are kept in addition to the best.

    Example:
        >>> checkpoints = Checkpoints(folder / "checkpoints")
        >>> with checkpoints.writing(1000, {"episodes": 20}) as scratch:
        ...     write_state(scratch / "learner.state", learner.state())
        >>> learner.restore(checkpoints.latest().state("learner"))
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self._keep = keep

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, or None.

        Raises:
            StateDamaged: its run.json is damaged.
        """
        found = self._list_complete()
        return Checkpoint(found[-1], _read_json(found[-1] / DOCUMENT, "take the one before")) if found else None

    def existing(self, env_steps: int | None = None) -> Checkpoint:
        """Return the newest complete checkpoint.

        Args:
            env_steps: those of the end of a run, whose last one it has to be; None: any.

        Raises:
            NoCheckpoint: there is none.
            CheckpointError: it is an earlier one: the disk was full, say.
        """
        found = self.latest()
        if found is None:
            raise NoCheckpoint(f"no checkpoint in {self.folder}: start without --resume")
        if env_steps not in (None, found.env_steps):
            raise CheckpointError(
                f"{found.folder} is the newest checkpoint, expected one at {env_steps:,} steps, which could not be "
                "written: make room and go on with --resume"
            )
        return found

    @contextmanager
    def writing(self, env_steps: int, document: Mapping[str, Any]) -> Iterator[Path]:
        """Yield a folder for the block to write files to; at its end it becomes the checkpoint of that step.

        Args:
            env_steps: environment steps of the run.
            document: further entries of run.json; the block may add some.

        Raises:
            OSError: the disk is full; the folder is removed, and earlier checkpoints are unchanged.
        """
        scratch = self.begin()
        try:
            yield scratch
            self.complete(scratch, env_steps, document)
        finally:
            self.abandon(scratch)

    def begin(self) -> Path:
        """Create a folder for the files of a new checkpoint; then call `complete` or `abandon` with it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=self.folder, prefix=_WRITING))

    def complete(self, scratch: Path, env_steps: int, document: Mapping[str, Any]) -> Checkpoint:
        """Turn a folder created by `begin` into a checkpoint, and remove old ones."""
        whole = {"env_steps": env_steps, **document}
        (scratch / DOCUMENT).write_text(json.dumps(whole, indent=1), encoding="utf-8")
        target = self.folder / f"{_PREFIX}{env_steps:012d}"
        self._replace_folder(scratch, target)
        for old in self._list_complete()[: -self._keep]:
            (old / DOCUMENT).unlink()  # first, so that a partly removed folder is not mistaken for a checkpoint
            shutil.rmtree(old)
        return Checkpoint(target, whole)

    def abandon(self, scratch: Path) -> None:
        """Remove a folder created by `begin`, if it has not become a checkpoint."""
        shutil.rmtree(scratch, ignore_errors=True)

    def keep_best(self, evaluated: Path) -> Path:
        """Rename a folder created by `begin` to ``checkpoints/best``, replacing the previous one; return its path."""
        best = self.folder / _BEST
        self._replace_folder(evaluated, best)
        return best

    def best(self) -> dict[str, Any] | None:
        """Return evaluation.json of the best weights (env_steps, numbers, versions); None if there is none yet."""
        path = self.folder / _BEST / EVALUATION
        return _read_json(path, "go on without it") if path.exists() else None

    def sweep(self) -> None:
        """Remove what a killed run was writing or removing, and restore what it was replacing."""
        for path in self.folder.glob(f"{_WRITING}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(f"{_OLD}*"):
            replaced = self.folder / path.name.removeprefix(_OLD)
            if replaced.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(replaced)
        for path in self.folder.glob(f"{_PREFIX}*"):
            if not (path / DOCUMENT).is_file():
                shutil.rmtree(path, ignore_errors=True)

    def _replace_folder(self, scratch: Path, target: Path) -> None:
        """Rename a folder to a target that may exist; at any time either the old or the new one is on disk."""
        for path in (*scratch.iterdir(), scratch):
            _sync(path)
        scratch.chmod(0o755)
        old = self.folder / f"{_OLD}{target.name}"
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        scratch.rename(target)
        _sync(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def _list_complete(self) -> list[Path]:
        return sorted(path for path in self.folder.glob(f"{_PREFIX}*") if (path / DOCUMENT).is_file())


def _read_json(path: Path, then: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StateDamaged(f"{path} is damaged: {error}; remove {path.parent} to {then}") from error
    return found


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state: nested JSON-serializable values and arrays. CPU tensors are written as arrays.

    Raises:
        SpecMismatch: it contains something else; the message names its position.
    """
    content = encode_extra(state)
    write_atomically(path, _MAGIC + hashlib.sha256(content).digest() + content)


def read_state(path: Path) -> dict[str, Any]:
    """Read a state written by `write_state`; arrays are returned as NumPy arrays, tuples as lists.

    Raises:
        StateDamaged: the file is damaged or missing.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StateDamaged(f"{path} cannot be read: {os.strerror(error.errno or 0)}") from error
    content = data[len(_MAGIC) + 32 :]
    if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(content).digest() != data[len(_MAGIC) : len(_MAGIC) + 32]:
        raise StateDamaged(f"{path} is damaged: take an earlier checkpoint")
    try:
        return decode_extra(content)
    except ProtocolMismatch as error:
        raise StateDamaged(f"{path} is damaged: {error}") from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that readers find either the complete old or the complete new content, even after a crash."""
    data = content.encode() if isinstance(content, str) else content
    # Not mkstemp: its files are for their owner only, and the umask that would restore the default permissions can
    # only be read by changing it for all threads.
    scratch = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with scratch.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def write_table(path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a CSV file as `write_atomically` does."""
    with io.StringIO(newline="") as text:
        csv.writer(text).writerows((header, *rows))
        write_atomically(path, text.getvalue())


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
