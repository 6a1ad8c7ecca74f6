"""A multi-agent training from the settings to the report: `jurybox train marl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from jurybox.training.algorithms.ppo import PPO
from jurybox.training.report import page
from jurybox.training.report.page import Part, Section, Table
from jurybox.training.roles.hosted import builders
from jurybox.training.runtime.plan import Kind, Outcome, Plan, RoleSpec
from jurybox.training.runtime.progress import COLUMNS
from jurybox.training.runtime.serving import served_models
from jurybox.training.trainings.launchers import check_gpus
from jurybox.training.trainings.marl import MarlTraining, plan
from jurybox.training.trainings.recorded_run import RecordingOptions, recorded_run
from jurybox.training.trainings.training import Run, Training, carry_out


def train(
    settings: MarlTraining,
    *,
    command: str = "",
    **options: Unpack[RecordingOptions],
) -> Outcome:
    """Train, and write metrics, logs, checkpoints, summary.json and report.html to `settings.log_dir`.

    Raises:
        ConfigError: the settings don't fit the environment or each other.

    For other errors see `recorded_run`.
    """
    check_gpus(options.get("launcher"), {"learner_gpus": settings.learner_gpus})
    folder = settings.log_dir.absolute()  # an environment may change the current folder
    with ExitStack() as resources:
        serve = None
        if settings.policy == "served":
            log, http = folder / "server.log", settings.server_http
            shares: dict[str, Any] = {"http": http, "group": settings.server_group}
            serve = lambda models: resources.enter_context(served_models(models, settings.server, log, **shares))  # noqa: E731
        serial, launcher = bool(options.get("serial")), options.get("launcher")
        built = builders(settings.build_once, settings.n_envs, folder / "logs", launcher, serial=serial)
        how = resources.enter_context(built)
        planned = plan(settings, serve, builders=how)
        how.check(planned, settings.check_steps)
        return recorded_run(
            planned,
            folder,
            _columns(planned),
            settings,
            lambda outcome, rows, _: report(planned, settings, outcome, rows, folder, command),
            **options,
        )


def _columns(planned: Plan) -> tuple[str, ...]:
    learners = [planned.roles[number] for number in planned.of_kind(Kind.LEARNER)]
    names = sorted({agent for learner in learners for agent in str(learner.publishes).split("+")})
    told = {str(learner.publishes): _learner_columns(learner) for learner in learners}
    whats = dict.fromkeys(what for columns in told.values() for what in columns)
    return (
        *COLUMNS,
        *(("epsilon",) if "loss" in whats else ()),
        *(f"{what}_{group}" for what in whats for group, columns in told.items() if what in columns),
        *(f"return_{name}" for name in names),
        "eval_return",
        *(f"eval_return_{name}" for name in names),
        *(f"eval_random_{name}" for name in names),
    )


def _learner_columns(learner: RoleSpec) -> tuple[str, ...]:
    """Return the names of a learner's metrics."""
    return (*PPO.metrics, "stale", "missed", "skipped") if "rollout" in learner.settings else ("loss",)


def report(
    planned: Plan,
    settings: MarlTraining,
    outcome: Outcome,
    rows: Sequence[Mapping[str, float]],
    folder: Path,
    command: str,
) -> str:
    """Return the report as one HTML document."""
    facts: dict[str, object] = {"Seed": settings.seed}
    packages = ("torch", "numpy")
    if any("rollout" in planned.roles[number].settings for number in planned.of_kind(Kind.LEARNER)):
        dropped = [f"{count:,} by {name}" for name, count in outcome.rows_dropped.items()]
        facts["Rows dropped"] = ", ".join(dropped) or "none"
    sections = [
        Section("How it ended", [_headline(outcome), *_against_random(outcome)]),
        page.return_curve(rows, "Learning", "turns", "return, last 100 episodes"),
        None if outcome.serial else page.worked_when(folder / "timeline.json"),
        page.the_run(facts, settings.as_dict(), command, outcome, steps="Turns", packages=packages),
    ]
    heading = f"Jurybox: {len(planned.of_kind(Kind.LEARNER))} learners, one world"
    return page.render("Jurybox multi-agent report", heading, sections)


def _headline(outcome: Outcome) -> str:
    mean = "no episode has ended" if outcome.return_mean is None else f"mean return {outcome.return_mean:.1f}"
    return f"After {outcome.env_steps:,} turns {outcome.text}; {mean} over the last episodes."


def _against_random(outcome: Outcome) -> list[Part]:
    learned = {
        name.removeprefix("eval_return_"): value
        for name, value in outcome.evaluation.items()
        if name.startswith("eval_return_")
    }
    rows = []
    for agent, value in learned.items():
        baseline = outcome.evaluation.get(f"eval_random_{agent}", float("nan"))
        rows.append([agent, f"{value:.1f}", f"{baseline:.1f}", f"{value / baseline:.1f}" if baseline else "-"])
    return [Table(["Agent", "Learned policies", "Random play", "Ratio"], rows)] if rows else []


def _work(settings: MarlTraining, run: Run) -> str:
    settings = settings.model_copy(update={"log_dir": run.folder})
    run = run if settings.logging else replace(run, console=None)
    outcome = carry_out(partial(train, settings, command=run.command), run)
    return f"{outcome.text}: {outcome.env_steps:,} turns in {outcome.seconds:.0f} s"


TRAINING = Training("marl", MarlTraining, _work)
