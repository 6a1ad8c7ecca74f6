"""A hockey training from its settings to the report: what `jurybox train hockey` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from threadpoolctl import threadpool_limits

from jurybox.training.cluster.engine_spec import Serves
from jurybox.training.interrupts import Signals
from jurybox.training.recipes.hockey import plan, sizes_of
from jurybox.training.recipes.hockey_report import report
from jurybox.training.recipes.hockey_settings import HockeyTraining
from jurybox.training.recipes.launchers import check_gpus
from jurybox.training.recipes.recorded_run import recorded_run
from jurybox.training.run_folder import Tracker
from jurybox.training.runtime.launching import Launcher
from jurybox.training.runtime.plan import ConfigError, Outcome
from jurybox.training.runtime.progress import COLUMNS as OF_EVERY_RUN

# What may be another when a run is resumed: how long it goes on, who does the work, what is looked at.
MAY_CHANGE = (
    "steps",
    "minutes",
    "target",
    "workers",
    "envs_per_worker",
    "policy",
    "device",
    "learner_gpus",
    "engine_gpus",
    "max_ahead",
    "publish_interval",
    "weight_sync_interval",
    "max_lag",
    "evaluate_every",
    "evaluation_games",
    "matrix_games",
    "film_games",
    "checkpoint_every",
    "log_every",
    "on_failure",
)


def columns(settings: HockeyTraining) -> tuple[str, ...]:
    """Of metrics.csv, for every run with the same anchors the same."""
    return (
        *OF_EVERY_RUN,
        "wins",
        "losses",
        "touches",
        "critic_loss",
        "actor_loss",
        "value",
        "pool",
        "eval_points",
        *(f"eval_{what}_{who}" for who in settings.league.anchors for what in ("wins", "ties", "losses", "score")),
    )


def train(
    settings: HockeyTraining,
    folder: Path,
    *,
    serial: bool = False,
    resume: bool = False,
    console: Console | None = None,
    signals: Signals | None = None,
    command: str = "",
    trackers: Callable[[], Sequence[Tracker]] = lambda: (),
    launcher: Launcher | None = None,
) -> Outcome:
    """Train; leaves metrics, logs, checkpoints, past selves, summary.json, report.html and game.gif in `folder`.

    Raises:
        ConfigError: the environment cannot be made.
        RunLogError: the folder holds another run, and `resume` is not set.
        NothingToResume: there is no checkpoint to go on from.
        CheckpointError: the run was begun with other settings.
        ServerNotStarted: the policy was to be served, and its server did not come up.
    """
    gpus = {"learner_gpus": settings.learner_gpus, "engine_gpus": settings.engine_gpus}
    check_gpus(launcher, gpus)
    with ExitStack() as resources:
        # Networks this small are slower on two threads, and sums in another order would not be the same sums.
        resources.enter_context(threadpool_limits(1))
        address = engine = None
        if settings.policy == "served":
            from jurybox.training.recipes.hockey_served import ENGINE, engine_of, policy_server

            folder.mkdir(parents=True, exist_ok=True)
            serving: object = launcher
            if isinstance(serving, Serves) and not serial:
                if settings.on_failure == "serial":
                    raise ConfigError(
                        "on_failure='serial' does not go with a policy that an engine in a cluster serves, since that "
                        "ends with the processes: take on_failure='end', or policy='local'"
                    )
                engine = ENGINE
                serving.serve(engine_of(settings, sizes_of(settings)), folder / "server.log")
            else:
                address = resources.enter_context(policy_server(settings, sizes_of(settings), folder / "server.log"))
        planned = plan(settings, folder, address, engine)
        return recorded_run(
            planned,
            folder,
            columns(settings),
            settings.model_dump(mode="json"),
            lambda outcome, rows: report(settings, outcome, rows, folder, command),
            serial=serial,
            resume=resume,
            may_change=MAY_CHANGE,
            console=console,
            signals=signals,
            trackers=trackers,
            launcher=launcher,
        )
