"""The skeleton of every training: it reads settings, chooses the launcher, runs the training and reports the result.

A training is a `Training`: a name, its `Settings`, and a function that does the work. That function passes a plan
to the runtime (`carry_out`). The command line, signals, trackers, exit statuses and error messages
are the same for all trainings.
"""

from __future__ import annotations

import errno
import os
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from jurybox.protocol.revision import install_command
from jurybox.training import interrupts
from jurybox.training.errors import UsageError

if TYPE_CHECKING:
    from jurybox.training.run_folder import Tracker
    from jurybox.training.runtime.plan import Outcome
    from jurybox.training.runtime.settings import Settings

_FAILED, _USAGE, _COULD_NOT_START = 1, 2, 3

# Import names of the packages that pyproject.toml's extra `training` installs.
_EXTRA = (
    "gymnasium", "pettingzoo", "cloudpickle", "stable_baselines3", "cv2", "skimage", "sklearn", "scipy", "matplotlib",
    "jinja2", "tensorboard", "lz4", "zstandard", "Box2D", "imageio", "threadpoolctl",
)  # fmt: skip

_NO_SERVER = """\
{error}

A training asks a server for its scores. Leave --server (and JURYBOX_ADDRESS) out, and it starts one of its own; or
start one in another terminal:

    printf '[models.{model}]\\nfactory = "jurybox.server.jurors:panel"\\n' > photo.toml
    jurybox serve photo.toml

or see the whole with a server of its own: jurybox demo photo --out demo-out"""


@dataclass(frozen=True, slots=True)
class Run:
    """The arguments of a training's work function besides its settings.

    Attributes:
        folder: folder for all files of the run.
        console: console for progress and messages; None: no output.
        command: command line that repeats the run, for the report.
        serial: run everything in this process.
        resume: resume from the newest checkpoint in the folder.
        launcher: "local" or "ray".
        ray_address: address of the Ray cluster; None: Ray on this machine only.
        trackers: creates the trackers; called after the folder has been checked.
        more: options that only this training has.
    """

    folder: Path
    console: Console | None
    command: str = ""
    serial: bool = False
    resume: bool = False
    launcher: str = "local"
    ray_address: str | None = None
    trackers: Callable[[], Sequence[Tracker]] = lambda: ()
    more: Mapping[str, Any] = field(default_factory=dict)

    def refuse(self, why: Mapping[str, str]) -> None:
        """Raise ConfigError if an option without effect is given; `why` maps such options to the reason."""
        from jurybox.training.runtime.plan import refuse_unused

        given = {
            "--serial": self.serial,
            "--launcher": self.launcher != "local",
            **{f"--{name.replace('_', '-')}": value is not None for name, value in self.more.items()},
        }
        refuse_unused([name for name, there in given.items() if there], why)


@dataclass(frozen=True, slots=True)
class Training:
    """A training.

    Attributes:
        name: name in ``jurybox train NAME``, and of its experiments in trackers.
        settings: class of its settings.
        work: function that trains and returns a summary of a few sentences.
    """

    name: str
    settings: type[Settings]
    work: Callable[[Any, Run], str]


def named(training: str) -> Training:
    """Import the training "package.module:NAME"."""
    module, _, name = training.partition(":")
    found: Training = getattr(import_module(module), name)
    return found


def command_line() -> str:
    """Return the command that repeats this process's work."""
    return shlex.join(["jurybox", *sys.argv[1:]])


def carried_out(
    found: Training,
    settings: Settings,
    folder: Path,
    console: Console,
    *,
    command: str | None = None,
    mlflow: bool = False,
    wandb: bool = False,
    **options: Any,
) -> str:
    """Carry out a run, and return what is printed at its end.

    Args:
        command: command line that repeats the run; None: that of this process.
        mlflow, wandb: whether it is tracked there.
        options: further fields of `Run`.
    """
    from jurybox.training.trainings.progress import trackers

    run = Run(
        folder,
        console,
        command_line() if command is None else command,
        trackers=lambda: trackers(found.name, folder, settings.as_dict(), mlflow=mlflow, wandb=wandb),
        **options,
    )
    check_folder(folder)
    if run.serial:
        run.refuse({"--launcher": "--serial runs in this process"})
    if run.launcher == "local":  # Ray places a learner on a machine with GPUs, which this one may not have
        check_device(getattr(settings, "device", "cpu"))
    return f"{found.work(settings, run)}\n\nreport: {folder / 'report.html'}"


def left_in(folder: Path) -> str:
    """Return what a run that was stopped has left in its folder."""
    from jurybox.training.checkpoints import CheckpointError, Checkpoints

    try:
        found = Checkpoints(folder / "checkpoints").latest()
    except CheckpointError as error:
        return f"stopped; {error}"
    if found is None:
        return "stopped before the first checkpoint, so there is nothing to go on from"
    return f"stopped; --resume goes on from the checkpoint at {found.document['env_steps']:,} env steps"


def check_folder(folder: Path) -> None:
    """Raise RunLogError if `folder` cannot be created or written to, or a run is going on there. Creates nothing.

    A training takes the folder for itself later. This comes before its server, which would write over the log of the
    other run's.
    """
    from jurybox.training.run_folder import RunLogError, check_alone

    parent = folder.absolute()
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        raise RunLogError(f"{parent} is a file: expected a folder for --out, one that is there or can be made")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RunLogError(f"{parent} cannot be written to by this user: choose another folder with --out")
    check_alone(folder)


def check_device(device: str) -> None:
    """Raise ConfigError if torch has no such device on this machine. "cpu" needs no import of torch."""
    if device == "cpu":
        return
    import torch

    from jurybox.training.runtime.plan import ConfigError

    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f'device = "{device}" is no device of torch, expected "cpu", "cuda" or "cuda:0"') from error
    if wanted.type != "cuda":
        return
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (wanted.index or 0) >= there:
        found = f"torch finds {there} CUDA device{'' if there == 1 else 's'} on this machine"
        others = f' or "cuda:0" to "cuda:{there - 1}"' if there else ""
        raise ConfigError(
            f'device = "{device}": {found}, expected "cpu"{others} (`jurybox doctor` shows what torch has)'
        )


def carry_out(start: Callable[..., Outcome], run: Run) -> Outcome:
    """Run a plan with the run's launcher, and return the outcome.

    Args:
        start: function that runs the plan; called with serial, resume, console, signals, trackers and launcher, as
            `recorded_run` takes them.

    Raises:
        RunError: the launcher is unknown, or the cluster cannot be reached.
        RunFailed: a role failed permanently, or nothing was learned.
        KeyboardInterrupt: a signal arrived, and the run has stopped cleanly.
    """
    from jurybox.training.trainings.launchers import launcher_named

    signals = interrupts.Signals()
    with launcher_named(run.launcher, run.ray_address) as launcher:
        outcome = start(
            serial=run.serial,
            resume=run.resume,
            console=run.console,
            signals=signals,
            trackers=run.trackers,
            launcher=launcher,
        )
    conclude(outcome, signals)
    return outcome


def conclude(outcome: Outcome, signals: interrupts.Signals) -> None:
    """Pass a signal on, which has ended the run, and raise RunFailed if it failed or nothing was learned."""
    from jurybox.training.runtime.plan import End

    if outcome.end is End.SIGNAL:
        signal.raise_signal(signals.first)  # for the handler that was installed before the run
    if outcome.end is End.FAILED or not outcome.learned:
        raise RunFailed(outcome.text)


class RunFailed(RuntimeError):
    """The run could not continue; the message is the reason."""


def until_interrupted(
    work: Callable[[Console, ExitStack], str],
    out: Path | None,
    *,
    message: str,
    what: str = "the training",
    left: Callable[[], str] | None = None,
) -> None:
    """Do the work, release its resources, and exit with its status.

    An error is printed as one sentence. The traceback of an unexpected error is written to a file, in `out` if that
    folder exists.

    Args:
        work: does the work, and returns the text that is printed at the end.
        out: folder for the traceback file; None: the system's temporary folder.
        message: message printed when the first signal arrives.
        what: what messages call the work.
        left: returns a message about what an interrupted work has left, printed when its resources are released.
    """
    console, errors = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)
    resources = ExitStack()
    interrupts.take_over(lambda: errors.print(message, highlight=False))
    status, result, interrupted = 0, "", False
    try:
        require_extra()
        result = work(console, resources)
    except KeyboardInterrupt:
        status, interrupted = interrupts.exit_status() or 130, True
    except Exception as error:  # noqa: BLE001 (the outermost handler: resources are closed below)
        status = _status_of(error)
        errors.print(_sentence(error, out, what), highlight=False, markup=False)
    interrupts.ignore_from_now_on(status)
    resources.close()
    if interrupted and left is not None:
        errors.print(left(), highlight=False, markup=False)
    if status == 0:
        console.print(f"\n{result}", highlight=False, markup=False)
    interrupts.shorten_exit(status)
    raise typer.Exit(status)


def _status_of(error: Exception) -> int:
    """Return the exit status for an error."""
    if isinstance(error, ExtraMissing):  # first: the imports below need the missing packages
        return _USAGE
    from jurybox.client import Error
    from jurybox.training.runtime.local_server import ServerNotStarted

    if isinstance(error, UsageError | ModuleNotFoundError):
        return _USAGE
    return _COULD_NOT_START if isinstance(error, ServerNotStarted | NoServer | Error) else _FAILED


def _sentence(error: Exception, out: Path | None, what: str) -> str:
    """Return the message for an error; for an unexpected one, it also names the file with the traceback."""
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        return f"{package or error} is not installed, and {what} needs it: {install_command('training')}"
    if _status_of(error) != _FAILED or type(error).__name__ == "RunFailed":
        return str(error)
    if isinstance(error, OSError) and error.errno is not None:
        sentence = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            resume = " and go on with --resume" if what == "the training" else ""
            sentence = f"the disk is full: {sentence}. Make room{resume}"
    else:
        first = str(error).strip().partition("\n")[0]
        sentence = f"{what} ended with {type(error).__name__}: {first}" if first else f"{what} ended with {error!r}"
    where = _written(error, out)
    return f"{sentence}\n(the traceback is in {where})" if where else sentence


def _written(error: Exception, out: Path | None) -> Path | None:
    """Write the traceback to a file; return its path, or None if that failed."""
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
    """The packages of the extra `training` are not installed."""


def require_extra() -> None:
    """Raise ExtraMissing, with the command that installs it, if a package of the extra `training` is missing.

    The check does not import the packages, which would take seconds.
    """
    if missing := [name for name in _EXTRA if find_spec(name) is None]:
        raise ExtraMissing(
            f"trainings need {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed. Install "
            f"with: {install_command('training')}"
        )


class NoServer(RuntimeError):
    """No server answers at the address."""


def check_server(address: str, model: str) -> bool:
    """Return whether the server has the model. Raises NoServer if no server answers, ConfigError for no address."""
    from jurybox.client import Error, connect
    from jurybox.training.runtime.plan import ConfigError

    try:
        with connect(address, timeout=2.0) as server:
            return model in server.models()
    except ValueError as error:  # it is no address
        raise ConfigError(str(error)) from error
    except Error as error:
        raise NoServer(_NO_SERVER.format(error=error, model=model)) from error
