"""What a hockey training is told."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jurybox.training.algorithms.league import LeagueSettings
from jurybox.training.algorithms.td3_actor import TD3Settings
from jurybox.training.recipes.run_command import merged
from jurybox.training.runtime.plan import ConfigError, refuse_unused


@dataclass(frozen=True, slots=True)
class Shaping:
    """How the terms of a step's reward count for the learner; results are always told in the environment's own reward.

    Attributes:
        closeness: of the environment's term for keeping away from a puck in the own half; 1 is the environment's own.
        touch: for a catch.
        direction: of the speed at which the puck moves towards the opponent's goal.
    """

    closeness: float = 1.0
    touch: float = 0.0
    direction: float = 0.0


# Names in the plan: of its replays, its channel and its folder.
ROWS, RESULTS, CHANNEL, POOL = "rows", "results", "policy", "pool"
LEAVING = 8  # past selves that stay for a while when they have left: somebody may just have drawn them


class HockeyTraining(BaseModel):
    """Settings of one training; a TOML file and the command line hold the same names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = Field(0, ge=0, description="Everything random comes from it.")
    steps: int = Field(40_000_000, ge=1, description="Env steps in all: steps of games, whoever plays.")
    minutes: float | None = Field(None, gt=0, description="Stop after so many.")
    target: float | None = Field(None, ge=-1, le=1, description="Stop when an evaluation's points reach it.")

    environment: str | None = Field(None, description="module:Class made like the original; none: this package's own.")
    mode: Literal[0, 1, 2] = Field(0, description="0 whole games, 1 shooting, 2 defence.")
    workers: int = Field(1, ge=1, description="Collecting processes.")
    envs_per_worker: int = Field(8, ge=2, description="Games of each; one half steps while the other is computed.")
    policy: Literal["local", "served"] = Field("local", description="Who computes actions.")

    warmup: int = Field(10_000, ge=1, description="Env steps with random actions and without learning.")
    # A learner step costs about what 39 env steps cost: with one collector, both are busy.
    ratio: float = Field(1 / 36, gt=0, description="Learner steps for each env step.")
    max_ahead: int = Field(2000, ge=0, description="Env steps that collectors may be ahead of the learner.")
    publish_interval: int = Field(50, ge=1, description="Learner steps between two publications.")
    weight_sync_interval: int = Field(10, ge=1, description="A collector's steps between two looks for new weights.")
    max_lag: int | None = Field(20, ge=0, description="Publications that a collector may be behind; then it syncs.")

    batch: int = Field(128, ge=2)
    n_step: int = Field(8, ge=1)
    discount: float = Field(0.99, ge=0, le=1)
    capacity: int = Field(1_000_000, ge=1, description="Rows of the replay.")
    prioritized: bool = True
    alpha: float = Field(0.6, ge=0, le=1, description="How much priorities count.")
    beta: float = Field(0.4, ge=0, le=1, description="How much importance weights do.")
    both_sides: bool = Field(True, description="Keep what opponents saw and did: the learner is off-policy.")
    mirror: bool = Field(True, description="Half of each sample as in a looking-glass: the game is symmetric.")
    # A ladder over all games, as in D. Horgan et al., "Distributed Prioritized Experience Replay", ICLR 2018: some show
    # what the policy does, others what it does not do any more.
    noise: tuple[float, float] = Field((0.05, 0.5), description="Exploration in the first and in the last game.")
    noise_colour: float = Field(1.0, ge=0, description="0 white, 1 pink.")
    device: str = Field("cpu", description="Where the learner computes.")
    learner_gpus: float = Field(0, ge=0, description="That --launcher ray sets aside for the learner.")
    engine_gpus: float = Field(0, ge=0, description="Likewise for the engine of a served policy, which then uses it.")

    learner: TD3Settings = TD3Settings()
    league: LeagueSettings = LeagueSettings(anchor_share=0.75)
    shaping: Shaping = Shaping()
    snapshot_every: int = Field(2000, ge=1, description="Episodes between two snapshots for the pool.")
    evaluate_every: int = Field(500_000, ge=0, description="Env steps between two evaluations; 0: one at the end.")
    evaluation_games: int = Field(100, ge=1, description="Of an evaluation, against each anchor.")
    matrix_games: int = Field(20, ge=0, description="Of each pair in the report's win matrix; 0: no matrix.")
    film_games: int = Field(2, ge=0, description="In the report's moving picture; 0: none.")
    checkpoint_every: int = Field(1_000_000, ge=0, description="Env steps between two checkpoints; 0: one at the end.")
    log_every: int = Field(20_000, ge=1, description="Env steps between two rows of metrics.")
    on_failure: Literal["end", "serial"] = Field("end", description="When a process has failed too often.")

    @classmethod
    def read(cls, path: Path | None, changes: Mapping[str, Any]) -> HockeyTraining:
        """Settings of a TOML file (if there is one) with `changes`, which win.

        Raises:
            ConfigError: the file cannot be read, or a setting is unknown, out of its bounds or without effect.
        """
        try:
            said = merged(tomllib.loads(path.read_text(encoding="utf-8")) if path else {}, changes)
            settings = cls(**said)
            refuse_unused(_flat(said), settings.unused())
            return settings
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        except ValidationError as error:
            told = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise ConfigError(f"settings of the hockey training: {told}") from error

    def unused(self) -> dict[str, str]:
        """Settings that have no effect beside the others, and why; parts as ``league.NAME``."""
        unused: dict[str, str] = {}
        if not self.prioritized:
            unused |= dict.fromkeys(("alpha", "beta"), "prioritized is false")
        if self.league.weighting != "hard":
            unused["league.hardness"] = f"league.weighting is {self.league.weighting}"
        if not self.league.pool:
            names = ("snapshot_every", *(f"league.{name}" for name in ("anchor_share", "weighting", "least_games")))
            unused |= dict.fromkeys(names, "league.pool is 0, so there are no past selves")
        if self.environment is not None:
            unused["film_games"] = "only games of this package's own environment are filmed"
        if self.policy == "local":
            unused["engine_gpus"] = "policy is local, so there is no engine"
        if self.device == "cpu":
            unused["learner_gpus"] = 'device is "cpu": the learner would not use them'
        return unused

    def as_dict(self) -> dict[str, Any]:
        """Flat, for reports and trackers: parts as ``learner.NAME``."""
        flat: dict[str, Any] = {}
        for name, value in self.model_dump(mode="json").items():
            flat |= (
                {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
            )
        return flat


def _flat(said: Mapping[str, Any]) -> list[str]:
    """Names of settings, those of parts as ``part.NAME``."""
    names = []
    for name, value in said.items():
        names += [f"{name}.{inner}" for inner in value] if isinstance(value, Mapping) else [name]
    return names
