"""The hockey training as a plan of the runtime: collectors, a TD3 learner with its league, an evaluator."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

from jurybox.protocol.weights import WeightsLayout
from jurybox.training.algorithms.td3 import TD3
from jurybox.training.cluster.endpoints import BOOK
from jurybox.training.environments.hockey.factory import make_game
from jurybox.training.recipes.hockey_actor import CHANNEL, POOL, RESULTS, ROWS
from jurybox.training.recipes.hockey_collector import fields
from jurybox.training.recipes.hockey_settings import HockeyTraining
from jurybox.training.replay import Episodes, Field
from jurybox.training.runtime.plan import Budget, ChannelSpec, ConfigError, Kind, Pace, Plan, ReplaySpec, RoleSpec

_ACTOR = "jurybox.training.recipes.hockey_actor"
_LEARNER = "jurybox.training.recipes.hockey_learner"
_RESULTS_KEPT = 8192
_EVALUATOR_NICE = 10  # it takes its time; collectors and learner have their pace to keep


def sizes_of(settings: HockeyTraining) -> tuple[int, int]:
    """Of an observation and of an action.

    Raises:
        ConfigError: the environment cannot be made.
    """
    try:
        game = make_game(settings.environment, settings.mode)
    except (ImportError, ValueError) as error:
        raise ConfigError(str(error)) from error
    game.close()
    return game.observation_size, game.action_size


def plan(settings: HockeyTraining, folder: Path, address: str | None = None, engine: str | None = None) -> Plan:
    """The run that these settings ask for.

    Args:
        folder: of the run; past selves are kept in its ``pool/``.
        address: of a policy server on this machine with the models of `hockey_served.models`, where the policy is to
            be served.
        engine: name of an engine with them somewhere in a cluster, likewise; a launcher serves it.

    Raises:
        ConfigError: the environment cannot be made, or the ratio is too small.
    """
    sizes = sizes_of(settings)
    ratio = Fraction(settings.ratio).limit_denominator(100)
    if not ratio:
        raise ConfigError(f"ratio={settings.ratio}: expected at least one learner step for 100 env steps")
    told: dict[str, Any] = {"settings": settings.model_dump(mode="json")}
    served = {**told, "address": address}
    folders = {POOL: str(folder.resolve() / "pool")} | ({BOOK: str(folder.resolve() / "engines")} if engine else {})
    layout = WeightsLayout.of(TD3(*sizes, settings.learner).acting().state_dict())
    return Plan(
        roles=(
            *(
                RoleSpec(
                    f"actor-{number}",
                    Kind.ACTOR,
                    f"{_ACTOR}:HockeyActor",
                    {**served, "engine": engine},
                    writes=(ROWS, RESULTS),
                    reads=(CHANNEL,),
                )
                for number in range(settings.workers)
            ),
            RoleSpec(
                "learner",
                Kind.LEARNER,
                f"{_LEARNER}:HockeyLearner",
                {**served, "sizes": sizes},
                samples=(ROWS, RESULTS),
                publishes=CHANNEL,
                publish_every=settings.publish_interval,
                gpus=settings.learner_gpus,
            ),
            RoleSpec(
                "evaluator",
                Kind.EVALUATOR,
                f"{_ACTOR}:HockeyEvaluator",
                told,
                reads=(CHANNEL,),
                evaluate_every=settings.evaluate_every,
                nice=_EVALUATOR_NICE,
            ),
        ),
        replays=(
            ReplaySpec(
                ROWS,
                settings.capacity,
                fields(*sizes),
                episodes=Episodes(),
                prioritized=settings.prioritized,
                alpha=settings.alpha,
            ),
            ReplaySpec(RESULTS, _RESULTS_KEPT, {"opponent": Field((), "int64"), "winner": Field((), "int32")}),
        ),
        channels=(ChannelSpec(CHANNEL, layout),),
        pace=Pace(ratio.denominator, ratio.numerator, settings.warmup, settings.max_ahead),
        budget=Budget(
            settings.steps,
            None if settings.minutes is None else 60 * settings.minutes,
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
    )
