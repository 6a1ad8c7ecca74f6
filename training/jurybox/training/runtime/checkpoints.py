"""Checkpoints of a whole run: every role's state, the replays, the published weights, the counters; whole or not there.

One folder each, ``checkpoints/step-000012000``: ``run.json`` (counters, what was gathered, which file is whose),
``<role>.state``, ``replay-<name>.jbr``, ``weights-<name>.state``. It is written under another name and renamed.

``checkpoints/best`` is none to go on from. It holds the publications that an evaluation liked best, as the evaluator
had them (``weights-<name>.state``), and what it said of them (``evaluation.json``). Whenever a run is killed, the
newest whole checkpoint and the best are still there.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jurybox.training.run_folder import StateDamaged, read_state, write_state
from jurybox.training.runtime.plan import Kind, NothingToResume, Plan
from jurybox.training.runtime.role_context import EVALUATION, WRITING
from jurybox.training.runtime.scoreboard import Word
from jurybox.training.runtime.shared_resources import SharedResources

_PREFIX = "step-"
_BEST = "best"
_OLD = ".old-"  # begins the name of a folder that is being replaced
_COUNTS = (
    Word.ENV_STEPS,
    Word.LEARNER_STEPS,
    Word.EPOCHS,
    Word.EPISODES,
    Word.EVALUATED_AT,
    Word.FORCED,
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that is whole.

    Attributes:
        folder: where it is.
        said: its run.json.
    """

    folder: Path
    said: Mapping[str, Any]

    @property
    def env_steps(self) -> int:
        return int(self.said["env_steps"])

    @property
    def gathered(self) -> dict[str, Any]:
        """What the metrics had gathered."""
        return dict(self.said["gathered"])

    def state_path(self, role: str) -> Path | None:
        """The file of what the role saved; None where it is new in the plan."""
        path = self.folder / f"{role}.state"
        return path if path.exists() else None

    def state(self, role: str) -> dict[str, Any] | None:
        """What the role saved.

        Raises:
            StateDamaged: its file is not what was written.
        """
        path = self.state_path(role)
        return read_state(path) if path else None

    def put_back(self, plan: Plan, shared: SharedResources) -> None:
        """Fill a new run's shared memory: counters, replays, published weights under their versions.

        Counts of roles that the plan has no more are added to the first one of their kind.

        Raises:
            NothingToResume: it is of a run with other replays or channels.
        """
        expected = {"replays": [each.name for each in plan.replays], "channels": [each.name for each in plan.channels]}
        for what, names in expected.items():
            if self.said[what] != names:
                raise NothingToResume(f"{self.folder} has the {what} {self.said[what]}, this plan has {names}")
        numbers = {role.name: number for number, role in enumerate(plan.roles)}
        for name, (kind, counts) in self.said["roles"].items():
            of_kind = plan.of_kind(Kind(kind))
            number = numbers.get(name, of_kind[0] if of_kind else None)
            for word, count in zip(_COUNTS, counts, strict=True):
                if number is not None:
                    shared.scoreboard.words[number][word] += count
        for replay in plan.replays:
            shared.replay(replay.name).restore(self.folder / f"replay-{replay.name}.jbr")
        for channel in plan.channels:
            path = self.folder / f"weights-{channel.name}.state"
            if path.exists():
                published = read_state(path)
                with shared.publisher(channel.name) as publisher:
                    publisher.publish(published["state"], published["extra"], version=published["version"])


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: ``checkpoints/`` of the run; made when the first one is written.
        keep: the newest so many stay, and the best.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self._keep = keep

    def latest(self) -> Checkpoint | None:
        """The newest one that is whole."""
        found = self._found()
        return _read(found[-1]) if found else None

    def begin(self) -> Path:
        """A folder for the files of a checkpoint in the making."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=self.folder, prefix=WRITING))

    def write_role(self, scratch: Path, role: str, state: Mapping[str, Any]) -> None:
        """Add what a role saved."""
        write_state(scratch / f"{role}.state", state)

    def complete(
        self,
        scratch: Path,
        plan: Plan,
        shared: SharedResources,
        gathered: Mapping[str, Any],
        save_replay: Callable[[str, Path], None] | None = None,
    ) -> Checkpoint:
        """Add what the roles do not hold, while they rest, and make the checkpoint appear.

        Args:
            save_replay: writes the replay of that name to a file, where it is not the one in `shared`.
        """
        scoreboard = shared.scoreboard
        for replay in plan.replays:
            path = scratch / f"replay-{replay.name}.jbr"
            if save_replay is None:
                shared.replay(replay.name).save(path)
            else:
                save_replay(replay.name, path)
        for channel in plan.channels:
            reader = shared.reader(channel.name)
            if reader.newest:
                state, version, extra = reader.read(timeout=5.0)
                whole = {"state": state, "version": version, "extra": extra}
                write_state(scratch / f"weights-{channel.name}.state", whole)
        said = {
            "env_steps": scoreboard.env_steps,
            "replays": [each.name for each in plan.replays],
            "channels": [each.name for each in plan.channels],
            "roles": {
                role.name: [int(role.kind), [scoreboard.words[number][word] for word in _COUNTS]]
                for number, role in enumerate(plan.roles)
            },
            "gathered": dict(gathered),
        }
        (scratch / "run.json").write_text(json.dumps(said, indent=1), encoding="utf-8")
        target = self.folder / f"{_PREFIX}{said['env_steps']:012d}"
        self._appear(scratch, target)
        for old in self._found()[: -self._keep]:
            (old / "run.json").unlink()  # first: what is half removed must not be taken for one
            shutil.rmtree(old)
        return Checkpoint(target, said)

    def abandon(self, scratch: Path) -> None:
        """Remove a checkpoint that could not be completed."""
        shutil.rmtree(scratch, ignore_errors=True)

    def keep_best(self, evaluated: Path) -> Path:
        """Weights that were evaluated become ``checkpoints/best``, in the place of those before.

        Args:
            evaluated: a folder in this one, as an evaluator's `RoleContext` writes it.
        """
        best = self.folder / _BEST
        self._appear(evaluated, best)
        return best

    def best(self) -> dict[str, Any] | None:
        """What the evaluation said whose weights are kept: env_steps, numbers, versions; None before the first."""
        path = self.folder / _BEST / EVALUATION
        if not path.exists():
            return None
        try:
            said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise StateDamaged(f"{path} is damaged: {error}; remove {path.parent} to go on without it") from error
        return said

    def sweep(self) -> None:
        """Remove what a killed run was writing, and put back what it was about to replace."""
        for path in self.folder.glob(f"{WRITING}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(f"{_OLD}*"):
            replaced = self.folder / path.name.removeprefix(_OLD)
            if replaced.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(replaced)

    def _appear(self, scratch: Path, target: Path) -> None:
        """Give a folder its name, in the place of the one that has it; at every moment one of both is there."""
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

    def _found(self) -> list[Path]:
        return sorted(path for path in self.folder.glob(f"{_PREFIX}*") if (path / "run.json").is_file())


def _read(folder: Path) -> Checkpoint:
    try:
        return Checkpoint(folder, json.loads((folder / "run.json").read_text(encoding="utf-8")))
    except ValueError as error:
        raise StateDamaged(
            f"{folder / 'run.json'} is damaged: {error}; remove {folder} to take the one before"
        ) from error


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
