"""A photo training from the settings to the report: `jurybox train photo` and `jurybox demo photo`."""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jurybox.client import Error, connect
from jurybox.studies.photo.environment import PhotoConfig
from jurybox.studies.photo.environment.audit import load_perceptual
from jurybox.studies.photo.evaluation import evaluate_policy, straightening_of
from jurybox.studies.photo.learning import PhotoTraining, check_workers, columns, plan
from jurybox.studies.photo.report import PhotoRun, comparisons, render, verdict_of
from jurybox.training import interrupts
from jurybox.training.checkpoints import Checkpoints
from jurybox.training.policies import Policy, choose
from jurybox.training.report.verdict import Verdict, judge
from jurybox.training.run_folder import RunLog, RunLogError, Tracker, alone_in, clear, recorded
from jurybox.training.runtime.local_server import LocalServer
from jurybox.training.runtime.plan import ConfigError, End, Outcome
from jurybox.training.runtime.serving import served_models
from jurybox.training.runtime.shared_resources import SharedResources
from jurybox.training.trainings.launchers import Spread, spread_named
from jurybox.training.trainings.progress import ConsoleProgress, Watcher
from jurybox.training.trainings.recorded_run import Metrics, recorded_run
from jurybox.training.trainings.training import Run, Training, check_server, conclude

_log = logging.getLogger(__name__)
_PROBE_TIMEOUT = 0.5  # time-out in seconds for a server that may run at the default address


def run(
    settings: PhotoTraining,
    folder: Path,
    watcher: Watcher,
    *,
    command: str,
    resume: bool = False,
    trackers: Callable[[], Sequence[Tracker]] = lambda: (),
    before: Mapping[str, float] | None = None,
    spread: Spread | None = None,
    network_address: str | None = None,
    serial: bool = False,
    juror: PhotoConfig | None = None,
    of_demo: bool = False,
) -> Verdict:
    """Train, evaluate on held-out photos, and write the report.

    Args:
        folder: folder for all files of the run.
        command: command line that repeats the run, for the report.
        resume: resume from the newest checkpoint in `folder`.
        trackers: creates the trackers; called after the folder has been checked.
        before: durations of earlier phases in seconds, by name, for the report.
        spread, network_address, serial: see `learning.plan`.
        juror: the environment's settings with the juror's actual address; None: as in the settings.
        of_demo: whether the next demo may remove this run.

    Returns:
        The verdict, which is also in the report and in summary.json.

    Raises:
        RunLogError: the folder holds another run and `resume` is not set, or a run is in progress there.
        CheckpointError: there is nothing to resume, or the run was started with other settings.
        ConfigError: the audit's learned distance cannot be loaded.
        KeyboardInterrupt: it was interrupted; the checkpoints written so far are complete.
    """
    try:
        perceptual = None if settings.perceptual is None else load_perceptual(settings.perceptual)
    except ValueError as error:
        raise ConfigError(f"perceptual: {error}") from error
    requested, settings = settings, settings if juror is None else settings.changed(environment=juror)
    where = "in this process" if serial else "by Ray" if spread is not None else "processes"
    verdicts: list[Verdict] = []
    shown = _Shown(settings, watcher)

    def begun() -> Sequence[Tracker]:
        if not of_demo:
            (folder / _DEMO).unlink(missing_ok=True)  # a demo that a training goes on with is one no more
        return [shown, *trackers()]

    def report(outcome: Outcome, rows: Metrics, log: RunLog) -> str | None:
        watcher.end()
        if outcome.end is End.SIGNAL:
            return None
        if spread is not None:
            log.extend_summary(**shown.workers)
        took = {**(before or {}), "training": outcome.seconds}
        status = _status(settings)  # before the evaluation, whose batches are not the training's
        began = time.monotonic()
        try:
            evaluation = evaluate_policy(
                settings.config, _learned(folder, outcome.env_steps), settings.damages, watcher, perceptual=perceptual
            )
        except Exception as error:
            log.extend_summary(evaluation_failed=f"{type(error).__name__}: {error}")
            raise
        took["evaluation"] = time.monotonic() - began
        interrupts.check()
        verdict, found = verdict_of(evaluation), comparisons(evaluation)
        straightened = straightening_of(evaluation.tilted)
        evaluation.save(folder / "evaluation.csv")
        log.extend_summary(
            verdict=verdict.answer,
            held_out={kind: float(evaluation.scores(kind).mean()) for kind in ("no edits", "random edits", "learned")},
            jury=judge(found).answer,
            audit={
                kind: {name: float(evaluation.audited(kind, name).mean()) for name in evaluation.cases[0].audit[kind]}
                for kind in ("no edits", "random edits", "learned")
            },
            intact_ciede2000=float(np.mean([each.audit["ciede2000"] for each in evaluation.intact])),
            straightening=None if straightened is None else asdict(straightened),
            differences={each.baseline: each.difference.as_dict() for each in found},
        )
        verdicts.append(verdict)
        facts = _facts(settings, outcome.env_steps, took, where)
        return render(
            PhotoRun(
                evaluation,
                rows,
                status,
                settings.environment.model,
                settings.as_dict(),
                facts,
                command,
                took["training"],
            )
        )

    signals = interrupts.Signals()
    try:
        outcome = recorded_run(
            plan(settings, serial=serial, spread=spread, network_address=network_address),
            folder,
            columns(settings.environment),
            requested,
            report,
            files=("evaluation.csv",),
            notify=watcher.log,
            trackers=begun,
            serial=True,  # it is one role, whose environments have the processes
            resume=resume,
            signals=signals,
            watch=shown.watch,
        )
    finally:
        watcher.end()
    conclude(outcome, signals)
    return verdicts[0]


class _Shown:
    """Shows the progress of a training; one of its trackers, since those are told its numbers."""

    def __init__(self, settings: PhotoTraining, watcher: Watcher) -> None:
        self._steps, self._watcher = settings.steps, watcher
        self._begun = False
        self._numbers: dict[str, float] = {}
        self.workers = {"env_worker_restarts": 0, "episodes_cut": 0}

    def watch(self, shared: SharedResources) -> None:
        counted = shared.scoreboard.env_steps
        if not self._begun:
            self._begun = True
            self._watcher.begin("training", self._steps, counted)
        self._watcher.advance(counted + shared.scoreboard.under_way, self._numbers)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if "return_mean" in values:
            self._numbers = {"return": values["return_mean"]}
        self.workers |= {name: int(values[name]) for name in self.workers if name in values}

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        pass


def _learned(folder: Path, env_steps: int) -> Callable[[Any], Any]:
    """The policy of the checkpoint after so many steps, as a function from an observation to an action."""
    network = Policy(choose(Checkpoints(folder / "checkpoints").existing(env_steps).folder)).served.module

    def act(seen: Any) -> Any:
        with torch.inference_mode():
            moves = network(torch.from_numpy(seen[None]))[0].numpy()
        return np.clip(moves, -1.0, 1.0)

    return act


def _status(settings: PhotoTraining) -> Mapping[str, Any] | None:
    """Return the server's status document; None without a server, or if a remote client cannot get it."""
    if settings.environment.scorer == "local":
        return None
    try:
        with connect(settings.environment.address, timeout=settings.environment.timeout) as server:
            return server.status()
    except Error as error:  # the report is written without this section
        _log.warning("the report is made without the server's figures: %s", error)
        return None


def _facts(settings: PhotoTraining, steps: int, took: Mapping[str, float], where: str) -> dict[str, str]:
    return {
        "Seed": str(settings.seed),
        "Steps": f"{steps:,} edit steps, {settings.rollout} between two updates",
        "Environments": f"{settings.n_envs} {where}",
        "Time": ", ".join(f"{name} {seconds:.0f} s" for name, seconds in took.items()),
    }


def _work(settings: PhotoTraining, given: Run) -> str:
    network_address = given.more.get("network_address")
    if given.launcher == "local":
        given.refuse({"--network-address": "it goes with --launcher ray"})
        check_workers(settings)
    with (
        juror_of(
            settings,
            given.folder,
            http=bool(given.more.get("server_http")),
            replicas=given.more.get("juror_replicas"),
        ) as juror,
        spread_named(given.launcher, given.ray_address) as spread,
    ):
        verdict = run(
            settings,
            given.folder,
            ConsoleProgress(given.console) if given.console else Watcher(),
            command=given.command,
            resume=given.resume,
            trackers=given.trackers,
            spread=spread,
            network_address=network_address,
            serial=given.serial,
            juror=juror,
        )
    return "\n".join((verdict.headline, *verdict.sentences))


@contextmanager
def juror_of(
    settings: PhotoTraining, folder: Path, *, http: bool = False, replicas: int | None = None
) -> Iterator[PhotoConfig]:
    """Provide the juror for the length of a ``with`` block; returns the environment's settings with its address.

    The juror is the server's model of this name. If the server has no such model, the juror is loaded there for this
    training. If no address is given and no server runs at the default one, a private server is started.

    Args:
        http: serve HTTP from a private server, too.
        replicas: engines of a private server.

    Raises:
        ConfigError: `http` or `replicas` is given and the server is not a private one, or ``juror_args`` are given for
            a juror that the server already has.
        NoServer: no server answers at the given address.
        Refused: the server does not have the juror, and its configuration does not allow it to be loaded.
    """
    config = settings.environment
    if config.scorer != "server":
        yield config
        return
    address = config.address or os.environ.get("JURYBOX_ADDRESS")
    wanted = {config.model: config.juror, **config.audit}
    models = {name: {"factory": factory, "max_batch": max(16, settings.n_envs)} for name, factory in wanted.items()}
    if config.juror_args:
        models[config.model]["args"] = config.juror_args
    for name in config.audit:
        models[name]["audit"] = True
    if address is not None:
        held = {name for name in wanted if check_server(address, name)}
    else:
        try:
            with connect(timeout=_PROBE_TIMEOUT) as server:
                address, held = server.address, wanted.keys() & set(server.models())
        except Error:
            held = set()
    if config.juror_args and config.model in held:
        raise ConfigError(
            f"environment.juror_args are for a juror that is loaded for this run, and the server at {address} has a "
            f"model {config.model!r} already: set `args` in its configuration, or choose another --model"
        )
    for name, given in {"server-http": http, "juror-replicas": replicas}.items():
        if given and address is not None:
            raise ConfigError(
                f"--{name} is of a private server, and the juror is on the one at {address}: set "
                f"`{name.partition('-')[2]}` in its configuration"
            )
    connected = replace(config, address=address)
    if wanted.keys() <= held:
        yield connected
        return
    missing = {name: entry for name, entry in models.items() if name not in held}
    folder.mkdir(parents=True, exist_ok=True)
    with served_models(missing, address, folder / "server.log", http=http, replicas=replicas or 1) as served:
        names = {name: served.names[name] for name in config.audit if name in missing}
        model = served.names.get(config.model, config.model)
        yield replace(connected, address=served.address, model=model, audit_models=names)


TRAINING = Training("photo", PhotoTraining, _work)


DAMAGES = 8
_DEMO = ".demo"  # marks a folder whose run the next demo may remove
WORKERS = 8
# The demo improves a policy that was shown cures before; docs/photo.md says on which photographs.
DEMO: Mapping[str, Any] = {
    "start": "shipped", "steps": 2560, "rollout": 640, "n_epochs": 4, "batch_size": 128, "learning_rate": 1e-4,
    "final_learning_rate": 2e-5, "log_std_init": -2.2,
}  # fmt: skip
DEMO_ENVIRONMENT: Mapping[str, Any] = {
    "juror": "jurybox.server.jurors:ranked", "price": 0.02, "intact": 0.6, "tilted": 0.5,
}  # fmt: skip
# The same training as anybody would set it up first: a juror of taste, nothing that edits cost, a new policy. So short
# a training needs many small updates; with the usual 4000 steps there would be only one.
GAMED: Mapping[str, Any] = {"steps": 5120, "rollout": 256}
GAMED_ENVIRONMENT: Mapping[str, Any] = {"juror": "jurybox.server.jurors:panel"}


def _demo_command(folder: Path, name: str, options: Mapping[str, object], defaults: Mapping[str, object]) -> str:
    """Return the command that repeats a demo: every option that differs from its default, and always seed and steps."""
    words = ["jurybox", "demo", name, "--out", str(folder)]
    for option, value in options.items():
        if option not in defaults or value != defaults[option]:
            words += [f"--{option}", str(value)]
    return shlex.join(words)


def demo(
    folder: Path,
    watcher: Watcher,
    resources: ExitStack,
    *,
    seed: int,
    steps: int | None = None,
    seconds: float | None = None,
    damages: int = DAMAGES,
    workers: int = WORKERS,
    juror: str | None = None,
    replicas: int = 1,
    gamed: bool = False,
) -> Verdict:
    """Run the demo.

    Args:
        folder: folder for the report and the training's other files; those of an earlier demo are removed. It must not
            hold another run.
        resources: must be closed by the caller in every case; this stops the server if it is still running.
        seed: seed of the training.
        steps, seconds: limits of the training; it ends when the first of the two is reached.
        damages: number of seeds of degradation in the evaluation.
        workers: number of env workers.
        juror: import path of the juror's factory, ``"package.module:function"``.
        replicas: number of engines that serve the juror.
        gamed: train a new policy against a juror that it can game, at no price.

    Raises:
        RunLogError: the folder holds a run that is not a demo's, or a run is in progress there.
        ServerNotStarted: the server failed to start; the message has the end of its log.
        KeyboardInterrupt: the demo was interrupted; `resources` still has to be closed.
    """
    began = time.monotonic()
    training, environment = (GAMED, GAMED_ENVIRONMENT) if gamed else (DEMO, DEMO_ENVIRONMENT)
    defaults = {
        "seconds": None, "damages": DAMAGES, "workers": WORKERS, "juror": environment["juror"], "juror-replicas": 1,
    }  # fmt: skip
    steps, juror = steps or training["steps"], juror or environment["juror"]
    with alone_in(folder):
        if recorded(folder) and not (folder / _DEMO).exists():
            raise RunLogError(f"{folder} holds a run that is not a demo's: choose another folder, or remove this one")
        clear(folder)
        (folder / _DEMO).touch()
    rows = 2 * workers + 16  # few: the demo should also run on machines with little shared memory
    models: dict[str, dict[str, str | int]] = {
        "photo": {"factory": juror, "max_batch": 16, "rows": rows, "lane_rows": 1, "deterministic": True}
    }
    server = LocalServer(models, folder / "server.log", server={"replicas": replicas})
    resources.callback(server.stop)
    watcher.log("starting a server on this machine's CPU")
    server.start()
    server.wait()
    started = time.monotonic() - began
    watcher.log(f"the server is ready after {started:.0f} s; while it runs: http://{server.http}/")
    settings = PhotoTraining.checked(
        {
            **training,
            "environment": PhotoConfig(address=server.address, **environment),
            "seed": seed,
            "steps": steps,
            "seconds": seconds,
            "envs": workers,
            "damages": damages,
            "checkpoint_every": 4 * training["rollout"],
        }
    )
    verdict = run(
        settings,
        folder,
        watcher,
        command=_demo_command(
            folder,
            "gamed" if gamed else "photo",
            {
                "seed": seed,
                "steps": steps,
                "seconds": seconds,
                "damages": damages,
                "workers": workers,
                "juror": juror,
                "juror-replicas": replicas,
            },
            defaults,
        ),
        before={"server start": started},
        of_demo=True,
    )
    server.stop()
    return verdict
