"""`jurybox train plan`: a user's plan, with the launcher, resuming, metrics and report of all trainings."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Unpack

from pydantic import Field

from jurybox.training.report import page
from jurybox.training.report.page import Section, Table
from jurybox.training.runtime.plan import Budget, ConfigError, Outcome, Plan, load
from jurybox.training.runtime.progress import COLUMNS
from jurybox.training.runtime.settings import Settings
from jurybox.training.trainings.recorded_run import RecordingOptions, recorded_run
from jurybox.training.trainings.training import Run, Training, carry_out


class PlanTraining(Settings):
    """Settings for a user's plan; everything else is set in the plan itself."""

    title = "plan"
    may_change: ClassVar[Sequence[str] | None] = ("steps", "seconds")

    plan: str = Field("", description="module:function that returns a Plan.")
    arguments: dict[str, Any] = Field({}, description="Keyword arguments of that function.")
    steps: int | None = Field(None, ge=1, description="Total env steps, instead of the plan's.")
    seconds: float | None = Field(None, gt=0, description="Stop after this many seconds, instead of the plan's.")


def plan_of(settings: PlanTraining) -> Plan:
    """Load the plan that the settings name, and apply the settings to it.

    A plan without checkpoints gets them every tenth of its steps.

    Raises:
        ConfigError: no function is named, it rejects the arguments, or it returns no plan.
        PlanError: the function does not exist, or the plan contradicts itself.
    """
    if not settings.plan:
        raise ConfigError("no plan: name one with --plan module:function, a function that returns a Plan")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # like `python -m`; the roles' processes get the same path
    try:
        made: Any = load(settings.plan)(**settings.arguments)
    except TypeError as error:
        raise ConfigError(f"{settings.plan} cannot be called with {dict(settings.arguments)}: {error}") from error
    if not isinstance(made, Plan):
        raise ConfigError(f"{settings.plan} gave a {type(made).__name__}: expected a jurybox.training.runtime.Plan")
    budget = Budget(settings.steps or made.budget.steps, settings.seconds or made.budget.seconds, made.budget.target)
    seed = settings.seed if "seed" in settings.model_fields_set else made.seed
    return replace(made, budget=budget, seed=seed, save_every=made.save_every or max(1, budget.steps // 10))


def train(
    settings: PlanTraining,
    folder: Path,
    *,
    command: str = "",
    **options: Unpack[RecordingOptions],
) -> Outcome:
    """Carry out the plan, and write metrics, logs, checkpoints, summary.json and report.html to `folder`."""
    planned = plan_of(settings)
    return recorded_run(
        planned,
        folder,
        (*COLUMNS, *planned.columns),
        settings,
        lambda outcome, rows, _: report(planned, settings, outcome, rows, folder, command),
        **options,
    )


def report(
    planned: Plan,
    settings: PlanTraining,
    outcome: Outcome,
    rows: Sequence[Mapping[str, float]],
    folder: Path,
    command: str,
) -> str:
    """Return the report as one HTML document."""
    facts = {"Seed": planned.seed, "Episodes": f"{outcome.episodes:,}"}
    evaluated = [[name.removeprefix("eval_"), f"{value:.4g}"] for name, value in outcome.evaluation.items()]
    sentence = f"After {outcome.env_steps:,} env steps {outcome.text}."
    tables = [Table(["Last evaluation", ""], evaluated)] if evaluated else []
    sections = [
        Section("How it ended", [sentence, *tables]),
        page.return_curve(rows, "Learning", "env steps", "return, last 100 episodes") if outcome.episodes else None,
        None if outcome.serial else page.worked_when(folder / "timeline.json"),
        page.the_run(facts, settings.as_dict(), command, outcome),
    ]
    return page.render("Jurybox report", f"Jurybox: {settings.plan}", sections)


def _work(settings: PlanTraining, run: Run) -> str:
    outcome = carry_out(partial(train, settings, run.folder, command=run.command), run)
    return (
        f"{outcome.text}: {outcome.episodes:,} episodes, {outcome.env_steps:,} env steps, "
        f"{outcome.learner_steps:,} learner steps in {outcome.seconds:.0f} s"
    )


TRAINING = Training("plan", PlanTraining, _work)
