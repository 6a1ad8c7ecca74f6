"""How a training's command ends: interrupted or not, with everything stopped, and a status that says how it went."""

from __future__ import annotations

import errno
import os
import tempfile
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import typer
from rich.console import Console

from jurybox.training import interrupts

_FAILED, _USAGE, _COULD_NOT_START = 1, 2, 3

# What pyproject.toml's extra `training` installs, as it is imported.
_EXTRA = (
    "gymnasium", "pettingzoo", "cloudpickle", "stable_baselines3", "cv2", "skimage", "sklearn", "matplotlib",
    "tensorboard", "lz4", "zstandard", "Box2D", "imageio", "threadpoolctl",
)  # fmt: skip

_NO_SERVER = """\
{error}

A training asks a running server for its scores. Start one in another terminal:

    printf '[models.{model}]\\nfactory = "jurybox.server.jurors:panel"\\n' > photo.toml
    jurybox serve photo.toml

or see the whole with a server of its own: jurybox demo photo --out demo-out"""


def until_interrupted(work: Callable[[Console, ExitStack], str], out: Path | None, *, told: str) -> None:
    """Do the work and end the process with its exit status; whatever happens, what it started is stopped.

    An error is told in a sentence. The traceback of one that nobody foresaw is written to a file, in `out` if it is
    there.
    """
    console, errors = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)
    resources = ExitStack()
    interrupts.take_over(lambda: errors.print(told, highlight=False))
    status, said = 0, ""
    try:
        require_extra()
        said = work(console, resources)
    except KeyboardInterrupt:
        status = interrupts.exit_status() or 130
    except Exception as error:  # noqa: BLE001 (the outermost place: resources are closed below)
        status = _status_of(error)
        errors.print(_sentence(error, out), highlight=False, markup=False)
    interrupts.ignore_from_now_on()
    resources.close()
    if status == 0:
        where = f"\n\nreport: {out / 'report.html'}" if out else ""
        console.print(f"\n{said}{where}", highlight=False, markup=False)
    raise typer.Exit(status)


def _status_of(error: Exception) -> int:
    """Exit status for an error: those that the user can mend are told without a traceback."""
    if isinstance(error, ExtraMissing):  # first: what follows imports what is missing
        return _USAGE
    from jurybox.client import Error
    from jurybox.training.environments.cage.cyborg import CyborgMissing
    from jurybox.training.environments.photo import PhotoError
    from jurybox.training.recipes.progress import TrackerMissing
    from jurybox.training.run_folder import CheckpointError, RunLogError, StateDamaged
    from jurybox.training.runtime.local_server import ServerNotStarted
    from jurybox.training.runtime.plan import RunError

    usage = RunLogError | CheckpointError | TrackerMissing | PhotoError | RunError | CyborgMissing | StateDamaged
    if isinstance(error, usage | ModuleNotFoundError):
        return _USAGE
    return _COULD_NOT_START if isinstance(error, ServerNotStarted | NoServer | Error) else _FAILED


def _sentence(error: Exception, out: Path | None) -> str:
    """What to tell of an error: what it says itself, and for one that nobody foresaw also where its traceback is."""
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        return f"{package or error} is not installed, and this training needs it: pip install 'jurybox[training]'"
    if _status_of(error) != _FAILED or type(error).__name__ == "RunFailed":
        return str(error)
    if isinstance(error, OSError) and error.errno is not None:
        told = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            told = f"the disk is full: {told}. Make room and go on with --resume"
    else:
        first = str(error).strip().partition("\n")[0]
        told = f"the training ended with {type(error).__name__}: {first}" if first else f"it ended with {error!r}"
    where = _written(error, out)
    return f"{told}\n(the traceback is in {where})" if where else told


def _written(error: Exception, out: Path | None) -> Path | None:
    """The file that the traceback was written to; None where that could not be."""
    text = "".join(traceback.format_exception(error))
    for folder in (out, Path(tempfile.gettempdir())):
        if folder is not None and folder.is_dir():
            try:
                fd, name = tempfile.mkstemp(prefix="jurybox-error-", suffix=".txt", dir=folder)
                with os.fdopen(fd, "w", encoding="utf-8") as file:
                    file.write(text)
                return Path(name)
            except OSError:
                continue
    return None


class ExtraMissing(RuntimeError):
    """What trainings need is not installed."""


def require_extra() -> None:
    """Raises ExtraMissing, with the line that installs it, where a package of the extra `training` is missing.

    It looks for them without importing them, which would take seconds.
    """
    if missing := [name for name in _EXTRA if find_spec(name) is None]:
        raise ExtraMissing(
            f"trainings need {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed. Install "
            "with: pip install 'jurybox[training]' (from a clone: pip install '.[training]')"
        )


class NoServer(RuntimeError):
    """There is no server to train against, or it has no such juror."""


def check_server(address: str | None, model: str) -> None:
    """Raises NoServer where none answers at that address, or it has no such model."""
    from jurybox.client import Error, connect

    try:
        with connect(address, timeout=2.0) as server:
            server.describe(model)
    except Error as error:
        raise NoServer(_NO_SERVER.format(error=error, model=model)) from error
