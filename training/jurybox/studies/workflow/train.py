"""`jurybox train workflow`: a search over workflows as a plan of one trainer, and its report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

from threadpoolctl import threadpool_limits

from jurybox.protocol.weights import WeightsLayout
from jurybox.studies.workflow.cage.tables import UNIT_TYPES
from jurybox.studies.workflow.policy import FACTORY, learner_of, network_of, policy_server
from jurybox.studies.workflow.report import conclusion, render
from jurybox.studies.workflow.searched import TABLE, OrderEvaluation, Searched
from jurybox.studies.workflow.settings import WorkflowTraining, describe
from jurybox.studies.workflow.trainer import FOLDER
from jurybox.training.checkpoints import Checkpoints
from jurybox.training.interrupts import Signals
from jurybox.training.policies import Acts, Description
from jurybox.training.run_folder import RunLog
from jurybox.training.runtime.plan import (
    Budget,
    ChannelSpec,
    End,
    Kind,
    Outcome,
    Plan,
    PolicyServer,
    RoleSpec,
    refuse_unused,
)
from jurybox.training.runtime.progress import COLUMNS
from jurybox.training.trainings.launchers import Spread, spread_named
from jurybox.training.trainings.recorded_run import Metrics, RecordingOptions, recorded_run
from jurybox.training.trainings.training import Run, Training, conclude

POLICY = "policy"  # the weights channel
METRICS = (
    *COLUMNS,
    *("phase", "workflow", "total_reward", "alignment_reward", "obedience", "judged", "compliance", "fixes"),
    *("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance"),
    *("eval_return", "eval_error", "eval_obedience"),
)
_CHECKPOINT_EVERY = 10  # episodes of each network


def plan(
    settings: WorkflowTraining,
    folder: Path,
    *,
    serial: bool = False,
    spread: Spread | None = None,
    server: PolicyServer | None = None,
) -> Plan:
    """The plan of a search: one role, the trainer, beside workers for its networks.

    Args:
        folder: of the run.
        serial: run all networks in this process.
        spread: the cluster that the networks run on, to which this process is connected; None: this machine.
        server: where the policy acts, see `policy_server`; None: in this process.
    """
    step = settings.envs * settings.episode_length
    return Plan(
        roles=(
            RoleSpec(
                "trainer",
                Kind.TRAINER,
                "jurybox.studies.workflow.trainer:trainer",
                {
                    "workflow": settings.model_dump(mode="json"),
                    "serial": serial,
                    "ray": None if spread is None else asdict(spread),
                    "server": None if server is None else asdict(server),
                },
                publishes=POLICY,
            ),
        ),
        channels=(ChannelSpec(POLICY, WeightsLayout.of(learner_of(settings.ppo).network().state_dict())),),
        budget=Budget(-(-settings.total_episodes // settings.envs) * step),
        seed=settings.seed,
        save_every=_CHECKPOINT_EVERY * step,
        log_every=step,
        best="return",
        folders={FOLDER: str(folder.resolve())},
        policy=description(settings).as_dict(),
    )


def description(settings: WorkflowTraining) -> Description:
    """Return the description of the policy. The workflow that it is played with is published with its weights."""
    network = network_of(settings.ppo.hidden)
    acts = Acts(FACTORY, network, f"weights-{POLICY}.state", output="logits", choose="draw")  # as in evaluations
    kept = ("env", "red", "quirk", "episode_length", "use_masks", "order_masks", "show_turns")
    return Description(
        "workflow",
        {POLICY: acts},
        "jurybox.studies.workflow.defended:Defended",
        {name: getattr(settings, name) for name in kept},
        settings.model_dump(mode="json"),
        settings.seed,
    )


def run(
    settings: WorkflowTraining,
    folder: Path,
    *,
    command: str = "",
    spread: Spread | None = None,
    **options: Unpack[RecordingOptions],
) -> str:
    """Search, and write the report; return the conclusion.

    Args:
        folder: folder for all files of the run.
        command: command line that repeats the run, for the report.
        spread: see `plan`.
        options: see `recorded_run`; serial: run all networks in this process.

    Raises:
        RunLogError: the folder holds another run and `resume` is not set, or a run is in progress there.
        CheckpointError: there is nothing to resume, or the run was started with other settings.
        ConfigError: a setting is set that would have no effect.
        KeyboardInterrupt: it was interrupted; the checkpoints written so far are complete.
    """
    if spread is None and settings.env == "cage":
        why = "our simulator runs in this process (workers are of --env cyborg, or of --launcher ray)"
        refuse_unused(() if settings.workers is None else ("workers",), {"workers": why})
    said: list[str] = []

    def report(outcome: Outcome, rows: Metrics, log: RunLog) -> str | None:
        if outcome.end is End.SIGNAL:
            return None
        found = searched(settings, folder, outcome.env_steps)
        found.write_table(folder)
        said[:] = conclusion(found)
        if found.final is not None:
            log.extend_summary(return_mean=found.final.returns, return_std=found.final.spread)
        log.extend_summary(**_more(found), env_worker_restarts=found.restarts, conclusion=said)
        return render(found, rows, _facts(settings, outcome.seconds), command)

    signals, serial = options.get("signals") or Signals(), options.get("serial", False)
    options |= {"signals": signals, "serial": True}  # it is one role, whose networks have the processes
    # A second thread slows down so small a network.
    with threadpool_limits(1), policy_server(settings, folder / "server.log") as server:
        planned = plan(settings, folder, serial=serial, spread=spread, server=server)
        outcome = recorded_run(planned, folder, METRICS, settings, report, files=(TABLE,), **options)
    conclude(outcome, signals)
    return "\n".join(said)


def searched(settings: WorkflowTraining, folder: Path, env_steps: int) -> Searched:
    """Return what a search has found, from its checkpoint after so many steps."""
    state = Checkpoints(folder / "checkpoints").existing(env_steps).state("trainer")
    assert state is not None, "the checkpoint of a search has it"
    found = Searched(settings)
    found.restore_found(state)
    return found


def _more(found: Searched) -> dict[str, Any]:
    final, reference = found.final, found.reference
    return {
        "workflow": None if found.best is None else describe(found.best),
        "gate_on": found.settings.gate_on,
        "verdict": None if final is None else found.verdict_on(final),
        "obedience": None if final is None else final.obedience,
        "judged": None if final is None else final.judged,
        "compliance": None if final is None else final.rate,
        "fixes": None if final is None else final.fixes,
        "unconstrained_return": None if reference is None else reference.returns,
        "prices": [_price(each) for each in found.prices],
        "workflows_tried": len(found.tried),
        "workflows_passed": sum(each.verdict == "passed" for each in found.tried),
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
            command=given.command,
            spread=spread,
            serial=given.serial,
            console=given.console,
            resume=given.resume,
            trackers=given.trackers,
        )


TRAINING = Training("workflow", WorkflowTraining, _work)
