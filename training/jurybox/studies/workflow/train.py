"""`jurybox train workflow`: a search over workflows, recorded in a folder with logs, checkpoints and report."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from jurybox.protocol.wire import build_version
from jurybox.studies.workflow import environments
from jurybox.studies.workflow.cage.tables import UNIT_TYPES
from jurybox.studies.workflow.environments import Parts
from jurybox.studies.workflow.policy import FACTORY, network_of, policies
from jurybox.studies.workflow.report import conclusion, render
from jurybox.studies.workflow.rollouts import share
from jurybox.studies.workflow.settings import WorkflowTraining, describe
from jurybox.studies.workflow.trainer import OrderEvaluation, WorkflowTrainer
from jurybox.training import interrupts
from jurybox.training.checkpoints import EVALUATION, Checkpoint, Checkpoints, write_atomically, write_state
from jurybox.training.run_folder import RunLog, Summary, Tracker, recording, write_settings
from jurybox.training.runtime.plan import POLICY_FILE, refuse_unused
from jurybox.training.trainings.launchers import Spread, spread_named
from jurybox.training.trainings.progress import ConsoleProgress, Watcher
from jurybox.training.trainings.recorded_run import failed_report
from jurybox.training.trainings.training import Run, Training
from jurybox.training.vector import ProcessVectorEnv


@contextmanager
def networks(
    settings: WorkflowTraining, spread: Spread | None, *, serial: bool = False, resumed_at: int = 0
) -> Iterator[tuple[Parts, Parts, Callable[[], int]]]:
    """Create the networks to defend, for training and for evaluation. Use it in a ``with`` statement.

    It yields both, and a function that returns the number of env workers that were replaced.

    Args:
        spread: the cluster that the networks run on; None: this machine.
        serial: run all of them in this process.
        resumed_at: env steps of the checkpoint that the run resumes from.
    """
    with ExitStack() as held:
        if spread is None:
            made = []
            for stream in range(environments.STREAMS):
                parts = environments.make(settings, stream, serial=serial, resumed_at=resumed_at)
                made.append(parts)
                for part in parts:
                    held.callback(part.close)
            processes = [part for parts in made for part in parts if isinstance(part, ProcessVectorEnv)]
            yield made[0], made[1], lambda: sum(each.restarts for each in processes)
            return
        from jurybox.cluster.env_workers import EnvWorkers
        from jurybox.cluster.vector_env import SpreadVectorEnv, WorkerGroups

        halves = environments.halves(settings)
        # Our simulator is fast enough for one worker to keep up with the learner.
        wanted = settings.workers or (1 if settings.env == "cage" else spread.cores)
        count = min(wanted, *map(len, halves))
        rows = [environments.share_out(half, count) for half in halves]
        # Each worker has some rows of every part of both streams.
        makers = [
            [environments.maker(settings, half[worker]) for _ in range(environments.STREAMS) for half in rows]
            for worker in range(count)
        ]
        workers = held.enter_context(EnvWorkers([partial(WorkerGroups, each) for each in makers], spread.needs))
        streams: list[Parts] = []
        for stream in range(environments.STREAMS):
            parts = tuple(
                SpreadVectorEnv(workers, stream * len(halves) + index, [*map(len, rows[index])])
                for index in range(len(halves))
            )
            for part, half in zip(parts, halves, strict=True):
                environments.reset(part, settings, stream, half, resumed_at)
            streams.append(parts)
        yield streams[0], streams[1], lambda: workers.restarts


METRICS = (
    "phase",
    "workflow",
    "episodes",
    "return_mean",
    "return_std",
    "total_reward",
    "alignment_reward",
    "obedience",
    "judged",
    "compliance",
    "fixes",
    "policy_loss",
    "value_loss",
    "entropy",
    "approx_kl",
    "clip_fraction",
    "explained_variance",
    "learner_steps",
    "episodes_per_second",
)
_WORKFLOW_COLUMNS = (
    *("trial", "workflow", "mean", "std", "bound", "score", "return_mean", "return_error", "obedience", "judged"),
    *("compliance", "fixes", "episodes", "verdict"),
)
_CHECKPOINT_EVERY = 10  # updates


def run(
    settings: WorkflowTraining,
    folder: Path,
    watcher: Watcher | None = None,
    *,
    command: str = "",
    resume: bool = False,
    trackers: Callable[[], Sequence[Tracker]] = lambda: (),
    spread: Spread | None = None,
    serial: bool = False,
) -> str:
    """Search, and write the report; return the conclusion.

    Args:
        folder: folder for all files of the run.
        command: command line that repeats the run, for the report.
        resume: resume from the newest checkpoint in `folder`.
        trackers: creates the trackers; called after the folder has been checked.
        spread: the cluster that the networks to defend run on; None: this machine.
        serial: run all networks in this process.

    Raises:
        RunLogError: the folder holds another run and `resume` is not set, or a run is in progress there.
        CheckpointError: there is nothing to resume, or the run was started with other settings.
        ConfigError: a setting is set that would have no effect.
    """
    watcher = watcher or Watcher()
    if spread is None and settings.env == "cage":
        why = "our simulator runs in this process (workers are of --env cyborg, or of --launcher ray)"
        refuse_unused(() if settings.workers is None else ("workers",), {"workers": why})
    with ExitStack() as held:
        log, found = held.enter_context(recording(folder, METRICS, settings, watcher.log, resume=resume))
        held.enter_context(threadpool_limits(1))  # a second thread slows down so small a network
        resumed_at = 0 if found is None else found.env_steps
        made = networks(settings, spread, serial=serial, resumed_at=resumed_at)
        env, evaluation, restarts = held.enter_context(made)
        policy = held.enter_context(policies(settings, folder / "server.log"))
        trainer = WorkflowTrainer(settings, env, evaluation, policy)
        write_settings(folder, settings)
        log.add_trackers(trackers())
        earlier: Mapping[str, Any] = {} if found is None else found.document
        if found is not None:
            _restore(trainer, found)

        def replaced() -> int:
            return int(earlier.get("restarts", 0)) + restarts()

        spent = float(earlier.get("seconds", 0.0))
        held.callback(watcher.end)  # after Ctrl-C, too: a bar hides the terminal's cursor
        spent += _search(trainer, folder, log, watcher, spent, replaced)
        _write_workflows(trainer, folder)
        log.summarise(_summary(trainer, settings, spent))
        sentences = conclusion(trainer)
        log.extend_summary(**_more(trainer), env_worker_restarts=replaced(), conclusion=sentences)
        try:
            page = render(trainer, log.rows(), _facts(settings, spent), command)
        except Exception as error:
            failed_report(folder, " ".join(sentences), error, settings.as_dict(), command)
            raise
        write_atomically(folder / "report.html", page)
        log.finish([folder / "report.html", folder / "workflows.csv"])
    return "\n".join(sentences)


def _search(
    trainer: WorkflowTrainer,
    folder: Path,
    log: RunLog,
    watcher: Watcher,
    before: float,
    replaced: Callable[[], int],
) -> float:
    began = time.monotonic()
    total = trainer.settings.total_episodes
    watcher.begin("episodes", total, trainer.episodes)
    tried = len(trainer.tried)
    first = trainer.episodes

    def on_progress(episodes: float, evaluated: float | None) -> None:
        # With CybORG an update takes about 15 seconds, and an evaluation minutes.
        interrupts.check()
        watcher.advance(int(episodes), {} if evaluated is None else {"evaluated": evaluated})

    trainer.on_progress = on_progress
    while not trainer.done:
        interrupts.check()
        numbers = trainer.advance()
        spent = time.monotonic() - began
        numbers["episodes_per_second"] = (trainer.episodes - first) / spent
        log.scalars(trainer.env_steps, numbers)
        watcher.advance(trainer.episodes, {name: numbers[name] for name in ("return_mean", "obedience")})
        if len(trainer.tried) > tried:
            tried = len(trainer.tried)
            last = trainer.tried[-1]
            counted, complied = last.evaluated.counts(trainer.settings.gate_on)
            watcher.log(
                f"{tried}: {describe(last.order)}: return {last.evaluated.returns:.1f}, {trainer.settings.gate_on} "
                f"{share(complied, counted):.1%} of {counted} ({last.verdict}), {last.episodes} episodes"
            )
            _write_workflows(trainer, folder)
        if trainer.updates % _CHECKPOINT_EVERY == 0 or trainer.done:
            try:
                _save(trainer, folder, before + spent, replaced())
            except OSError as error:  # a full disk must not end the search
                watcher.log(f"no checkpoint at update {trainer.updates}, the one before stands: {error}")
    watcher.end()
    return time.monotonic() - began


def _save(trainer: WorkflowTrainer, folder: Path, seconds: float, restarts: int) -> None:
    # First, since a search that is resumed from its last checkpoint is done, and writes no policy any more.
    if trainer.final is not None:
        _keep_best(trainer, folder)
    # With the random states of our own simulator, a resumed run continues as it would have without the interruption.
    streams = [environments.random_state(trainer.settings, parts) for parts in trainer.environments]
    document = {"seconds": seconds, "restarts": restarts, "environments": streams}
    with interrupts.held(), Checkpoints(folder / "checkpoints").writing(trainer.env_steps, document) as scratch:
        write_state(scratch / "search.state", trainer.state())
        _write_policy(scratch, trainer, trainer.last or trainer.learner.acting.state_dict())


def _keep_best(trainer: WorkflowTrainer, folder: Path) -> None:
    """Save the policy of the final evaluation as ``checkpoints/best``."""
    found, checkpoints = trainer.final, Checkpoints(folder / "checkpoints")
    assert found is not None
    numbers = {"return": found.returns, "error": found.error, "obedience": found.obedience}
    with interrupts.held():
        scratch = checkpoints.begin()
        try:
            _write_policy(scratch, trainer, trainer.learner.acting.state_dict())
            document = {"env_steps": trainer.env_steps, "numbers": numbers, "versions": {}}
            write_atomically(scratch / EVALUATION, json.dumps(document, indent=1))
            checkpoints.keep_best(scratch)
        finally:
            checkpoints.abandon(scratch)


def _write_policy(place: Path, trainer: WorkflowTrainer, weights: Mapping[str, torch.Tensor]) -> None:
    """Write weights, and the description for ``jurybox policy`` with the trainer's current workflow."""
    from jurybox.training.policies import Acts, Description

    settings = trainer.settings
    network = network_of(settings.ppo.hidden)
    acts = Acts(FACTORY, network, "weights-policy.state", output="logits", choose="draw")  # as in evaluations
    kept = ("env", "red", "quirk", "episode_length", "use_masks", "order_masks", "show_turns")
    arguments = {name: getattr(settings, name) for name in kept}
    arguments["order"] = None if trainer.order is None else describe(trainer.order)
    description = Description(
        *("workflow", {"policy": acts}, "jurybox.studies.workflow.defended:Defended"),
        arguments,
        settings.model_dump(mode="json"),
        settings.seed,
    )
    write_state(place / acts.weights, {"state": dict(weights), "version": trainer.learner_steps, "extra": {}})
    write_atomically(place / POLICY_FILE, json.dumps(description.as_dict(), indent=1))


def _restore(trainer: WorkflowTrainer, checkpoint: Checkpoint) -> None:
    state = checkpoint.state("search")
    assert state is not None
    trainer.restore(state)
    for parts, stream in zip(trainer.environments, checkpoint.document["environments"], strict=True):
        environments.restore_random_state(trainer.settings, parts, stream)


def _write_workflows(trainer: WorkflowTrainer, folder: Path) -> None:
    """Write workflows.csv with a row for each workflow that was tried."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(_WORKFLOW_COLUMNS)
    for number, each in enumerate(trainer.tried, 1):
        found = each.evaluated
        believed = each.mean, each.std, each.bound, each.score
        values_found = (found.returns, found.error, found.obedience), (found.rate, found.fixes)
        first, second = (
            [f"{value:.4f}" for value in values] for values in ((*believed, *values_found[0]), values_found[1])
        )
        row = (number, describe(each.order), *first, found.judged, *second, each.episodes, each.verdict)
        writer.writerow(row)
    write_atomically(folder / "workflows.csv", text.getvalue())


def _summary(trainer: WorkflowTrainer, settings: WorkflowTraining, seconds: float) -> Summary:
    final = trainer.final
    return Summary(
        env_steps=trainer.env_steps,
        learner_steps=trainer.learner_steps,
        episodes=trainer.episodes,
        seconds=seconds,
        return_mean=float(np.mean(trainer.recent)) if final is None else final.returns,
        return_std=float(np.std(trainer.recent)) if final is None else final.spread,
        seed=settings.seed,
        version=build_version(),
    )


def _more(trainer: WorkflowTrainer) -> dict[str, Any]:
    final, reference = trainer.final, trainer.reference
    return {
        "workflow": None if trainer.best is None else describe(trainer.best),
        "gate_on": trainer.settings.gate_on,
        "verdict": None if final is None else trainer.verdict_on(final),
        "obedience": None if final is None else final.obedience,
        "judged": None if final is None else final.judged,
        "compliance": None if final is None else final.rate,
        "fixes": None if final is None else final.fixes,
        "unconstrained_return": None if reference is None else reference.returns,
        "prices": [_price(each) for each in trainer.prices],
        "workflows_tried": len(trainer.tried),
        "workflows_passed": sum(each.verdict == "passed" for each in trainer.tried),
    }


def _price(each: OrderEvaluation) -> dict[str, Any]:
    found = each.evaluated
    return {
        "first": None if each.first is None else UNIT_TYPES[each.first],
        "obedience": found.obedience,
        "judged": found.judged,
        "obedience_without_order": each.anyway,
        "compliance": found.rate,
        "fixes": found.fixes,
        "return": found.returns,
        "return_error": found.error,
        "taken_over": found.taken_over,
        "taken_over_error": found.taken_over_error,
    }


def _facts(settings: WorkflowTraining, seconds: float) -> dict[str, str]:
    return {
        "Seed": str(settings.seed),
        "Budget": f"{settings.total_episodes:,} episodes of {settings.episode_length} steps, {settings.envs} at once",
        "Attacker": f"{settings.red}, {'CybORG' if settings.env == 'cyborg' else 'our simulator'}",
        "Policy": "served" if settings.policy == "served" else "in this process",
        "Time": f"{seconds:.0f} s",
    }


def _work(settings: WorkflowTraining, given: Run) -> str:
    if given.serial and settings.workers is not None:
        refuse_unused(("workers",), {"workers": "--serial runs in this process"})
    with spread_named(given.launcher, given.ray_address) as spread:
        return run(
            settings,
            given.folder,
            ConsoleProgress(given.console) if given.console else None,
            command=given.command,
            resume=given.resume,
            trackers=given.trackers,
            spread=spread,
            serial=given.serial,
        )


TRAINING = Training("workflow", WorkflowTraining, _work)
