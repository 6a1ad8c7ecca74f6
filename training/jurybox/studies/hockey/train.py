"""The hockey training: its plan, the run from settings to report, and the work of `jurybox train hockey`."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from threadpoolctl import threadpool_limits

from jurybox.cluster.endpoints import REGISTRY, Serves
from jurybox.protocol.weights import WeightsLayout
from jurybox.studies.hockey.algorithm import FACTORY, algorithm_of, network_of
from jurybox.studies.hockey.curriculum import Opponents
from jurybox.studies.hockey.games import OPPONENT, PLAYER, HockeyGames, fields
from jurybox.studies.hockey.report import report
from jurybox.studies.hockey.served import ENGINE, MODEL, POOL_MODEL, engine_of, policy_server
from jurybox.studies.hockey.settings import CHANNEL, POOL, RESULTS, ROWS, HockeyTraining
from jurybox.training.algorithms.registry import make
from jurybox.training.environments.making import EnvironmentPlace
from jurybox.training.policies import Acts, Description
from jurybox.training.replay import Episodes
from jurybox.training.roles.curriculum import columns as result_columns
from jurybox.training.roles.hosted import Builders, actors, builders, evaluator
from jurybox.training.runtime.launching import Local
from jurybox.training.runtime.plan import (
    Budget,
    ChannelSpec,
    ConfigError,
    Kind,
    Outcome,
    Plan,
    ReplaySpec,
    RoleSpec,
    Timeouts,
)
from jurybox.training.runtime.progress import COLUMNS as OF_EVERY_RUN
from jurybox.training.runtime.serving import ServedModels
from jurybox.training.trainings.launchers import check_gpus
from jurybox.training.trainings.recorded_run import RecordingOptions, recorded_run
from jurybox.training.trainings.training import Run, Training, carry_out

_STUDY, _ROLES = "jurybox.studies.hockey", "jurybox.training.roles"
_SPLITS = 2  # one half of an actor's games steps while actions for the other are computed
_AT_ONCE = 8  # games of the evaluator
_RESULTS_KEPT = 8192


def look(place: EnvironmentPlace, env: str | None, mode: int, *, shared: bool) -> tuple[int, int]:
    """Return the sizes of an observation and of an action. Raises ImportError, ValueError: see `make_game`."""
    games = HockeyGames(1, env, mode, places=[place], shared=shared)
    try:
        return games.games[0].observation_size, games.action_size
    finally:
        games.close()


def sizes_of(settings: HockeyTraining, how: Builders | None = None) -> tuple[int, int]:
    """Return the sizes of an observation and of an action.

    Args:
        how: where the game is looked at; None: here, in one of its own.

    Raises:
        ConfigError: the environment cannot be created.
    """
    how = how or Builders()
    try:
        found: tuple[int, int] = how.call(partial(look, shared=how.keeps), how.place, settings.env, int(settings.mode))
        return found
    except (ImportError, ValueError) as error:
        raise ConfigError(str(error)) from error


def plan(
    settings: HockeyTraining,
    folder: Path,
    served: ServedModels | None = None,
    engine: str | None = None,
    *,
    how: Builders | None = None,
) -> Plan:
    """Create the plan for these settings.

    Args:
        folder: folder of the run; past selves are stored in its ``pool/``.
        served: with a served policy, the server that has the models of `hockey.served.models`.
        engine: with a served policy, the name of an engine in the cluster that has these models; the launcher starts
            it.
        how: how roles get their games; None: each builds its own.

    Raises:
        ConfigError: the environment cannot be created.
    """
    how = how or Builders()
    sizes = sizes_of(settings, how)
    past = None if served is None else served.names[POOL_MODEL]
    folders = {POOL: str(folder.resolve() / "pool")} | ({REGISTRY: str(folder.resolve() / "engines")} if engine else {})
    algorithm = algorithm_of(settings, sizes)
    layout = WeightsLayout.of(make(**algorithm).network().state_dict())
    given = settings.model_dump(mode="json")
    curriculum = f"{_STUDY}.curriculum:Opponents"
    opponents = {
        "make": curriculum,
        "league": given["league"],
        "snapshot_every": settings.snapshot_every,
        "past": past,
        "observation": sizes[0],
    }
    local = {"make": f"{_STUDY}.opponents:LocalPolicies", "pool": settings.league.pool}
    serving = {**local, "make": f"{_STUDY}.served:ServedPolicies", "past": past, "engine": engine}
    # What acts needs no more of the algorithm than TD3's policy, and none of the modules with torch.
    adapter, arguments = how.adapter(
        f"{_STUDY}.games:HockeyGames", {"env": settings.env, "mode": int(settings.mode), "shaping": given["shaping"]}
    )
    plays: dict[str, Any] = {
        "adapter": adapter,
        "arguments": arguments,
        "policies": {PLAYER: CHANNEL, OPPONENT: CHANNEL},
        "algorithms": {CHANNEL: network_of(settings, sizes)},
    }
    acts = {
        **plays,
        "n": settings.envs_per_worker,
        "splits": 1 if how.shared else _SPLITS,  # what is lent by turns is stepped together
        "recorded": [PLAYER, OPPONENT] if settings.record_opponents else [PLAYER],
        "curriculum": curriculum,
        "results": RESULTS,
        "exploration": {
            "make": f"{_STUDY}.games:EpisodeNoise",
            "scales": given["action_noise"],
            "colour": settings.noise_color,
            "action_size": sizes[1],
        },
        "max_lag": settings.max_lag,
        "clients": local if served is None and engine is None else serving,
    }
    evaluates = {
        **plays,
        "clients": local,
        "suites": {who: {OPPONENT: f"anchor:{who}"} for who in settings.league.anchors},
        "episodes": settings.evaluation_games,
        "side_by_side": _AT_ONCE,
    }
    if how.shared:  # evaluations are in the first worker's games
        evaluates |= {"worker": 1, "side_by_side": min(_AT_ONCE, settings.envs_per_worker)}
    return Plan(
        roles=(
            *actors(settings.workers, acts, [ROWS, RESULTS], [CHANNEL]),
            RoleSpec(
                "learner",
                Kind.LEARNER,
                f"{_ROLES}.learner:OffPolicyLearner",
                {
                    "replay": ROWS,
                    "algorithm": algorithm,
                    "envs": settings.workers * settings.envs_per_worker,
                    "device": settings.device,
                    "compile": settings.compile,
                    "first": settings.unsampled + 1,  # the newest rows of each game have no successor yet
                    "beta": settings.beta,
                    "anchor_ratio": settings.anchor_ratio,
                    "anchor_first": settings.least_kept,
                    "augment": f"{_STUDY}.mirror:mirrored" if settings.mirror else None,
                    "curriculum": opponents,
                    "results": RESULTS,
                },
                samples=(ROWS, RESULTS),
                publishes=CHANNEL,
                publish_every=settings.publish_interval,
                gpus=settings.learner_gpus,
            ),
            evaluator(evaluates, [CHANNEL], settings.evaluate_every),
        ),
        replays=(
            ReplaySpec(
                ROWS,
                settings.buffer_size,
                fields(*sizes),
                episodes=Episodes(),
                prioritized=settings.prioritized,
                alpha=settings.alpha,
                anchor=settings.anchor_size,
            ),
            ReplaySpec(RESULTS, _RESULTS_KEPT, result_columns(Opponents)),
        ),
        channels=(ChannelSpec(CHANNEL, layout),),
        pace=settings.pace,
        timeouts=Timeouts().with_resets(settings.reset_timeout),
        budget=Budget(
            settings.steps,
            settings.seconds,
            None if settings.target is None else ("points", settings.target),
        ),
        seed=settings.seed,
        sync_every=settings.weight_sync_interval,
        max_lag=settings.max_lag,
        save_every=settings.checkpoint_every,
        log_every=settings.log_every,
        on_failure=settings.on_failure,
        best="points",
        folders=folders,
        server=None if served is None else served.feed({CHANNEL: MODEL}),
        policy=description(settings, sizes).as_dict(),
    )


def description(settings: HockeyTraining, sizes: tuple[int, int]) -> Description:
    """Return the description of the published policy. By default it plays against the weak bot."""
    action = sizes[1]
    acts = Acts(
        FACTORY,
        network_of(settings, sizes),
        f"weights-{CHANNEL}.state",
        output="action",
        choose="box",
        low=[-1.0] * action,
        high=[1.0] * action,
    )
    return Description(
        "hockey",
        {CHANNEL: acts},
        "jurybox.studies.hockey.single:HockeyEnv",
        {"opponent": "weak", "mode": int(settings.mode), "environment": settings.env},
        settings.model_dump(mode="json"),
        settings.seed,
    )


def columns(settings: HockeyTraining) -> tuple[str, ...]:
    """Return the columns of metrics.csv, which depend on the anchors."""
    return (
        *OF_EVERY_RUN,
        "wins",
        "losses",
        "touches",
        "critic_loss",
        "actor_loss",
        "value",
        "pool",
        *("device_utilization",) * settings.device.startswith("cuda"),
        "eval_points",
        *(
            f"eval_{what}_{opponent}"
            for opponent in settings.league.anchors
            for what in ("wins", "ties", "losses", "return")
        ),
    )


def train(
    settings: HockeyTraining,
    folder: Path,
    *,
    command: str = "",
    **options: Unpack[RecordingOptions],
) -> Outcome:
    """Train, and write metrics, logs, checkpoints, past selves, summary.json, report.html and game.gif to `folder`.

    Raises:
        ConfigError: the environment cannot be created, or the launcher does not support a setting.

    For other errors see `recorded_run`, and with a served policy `served_models`.
    """
    gpus = {"learner_gpus": settings.learner_gpus, "engine_gpus": settings.engine_gpus}
    launcher = options.get("launcher")
    check_gpus(launcher, gpus)
    if settings.anchor_size and not (launcher is None or isinstance(launcher, Local) or options.get("serial")):
        raise ConfigError(
            "anchor_size does not go with a launcher of several machines: rows that come from another one go into the "
            "ring, and the anchor would stay empty; leave it at 0"
        )
    with ExitStack() as resources:
        # A second thread slows down such small networks, and changes the order of sums and so their values.
        resources.enter_context(threadpool_limits(1))
        served = engine = None
        serial = bool(options.get("serial"))
        built = resources.enter_context(
            builders(settings.build_once, settings.workers, folder / "logs", launcher, serial=serial)
        )
        sizes = sizes_of(settings, built)
        if settings.policy == "served":
            folder.mkdir(parents=True, exist_ok=True)
            serving: object = launcher
            if isinstance(serving, Serves) and not serial and settings.server is None:
                if settings.on_failure == "serial":
                    raise ConfigError(
                        "on_failure='serial' does not go with a policy that an engine in a cluster serves, since that "
                        "ends with the processes: take on_failure='end', or policy='local'"
                    )
                engine = ENGINE
                serving.serve(engine_of(settings, sizes), folder / "server.log")
            else:
                served = resources.enter_context(policy_server(settings, sizes, folder / "server.log"))
        planned = plan(settings, folder, served, engine, how=built)
        built.check(planned, settings.check_steps)
        return recorded_run(
            planned,
            folder,
            columns(settings),
            settings,
            lambda outcome, rows, _: report(settings, outcome, rows, folder, command),
            **options,
        )


def _work(settings: HockeyTraining, run: Run) -> str:
    outcome = carry_out(partial(train, settings, run.folder, command=run.command), run)
    lines = [f"{outcome.text}: {outcome.episodes:,} games, {outcome.env_steps:,} steps in {outcome.seconds:.0f} s"]
    for opponent in settings.league.anchors:
        won, lost = (outcome.evaluation.get(f"eval_{what}_{opponent}") for what in ("wins", "losses"))
        if won is not None and lost is not None:
            lines.append(f"against {opponent}: {won:.0%} won, {lost:.0%} lost")
    return "\n".join(lines)


TRAINING = Training("hockey", HockeyTraining, _work)
