"""What a hockey training is told."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from jurybox.training.algorithms.league import LeagueSettings
from jurybox.training.algorithms.td3 import TD3Settings


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


@dataclass(frozen=True, slots=True)
class HockeyTraining:
    """Settings of one training.

    Attributes:
        seed: everything random comes from it.
        steps: env steps in all (steps of games, whoever plays), rounded up to whole rounds.
        environment: ``module:Class`` of another environment made like the original; None: this package's own.
        games: played side by side; a round is one episode of each.
        warmup: env steps with random actions and without learning.
        ratio: learner steps for each env step.
        batch, n_step, discount: of the learner's samples.
        capacity: rows of the replay.
        prioritized, alpha, beta: see `jurybox.training.replay`.
        both_sides: keep what opponents saw and did as well: the learner is off-policy, and learns from theirs too.
        mirror: hand half of each sample to the learner as in a looking-glass (left is right): the game is symmetric.
        noise: deviation of the exploration noise in the first and in the last of the games, those between in equal
            ratios (a ladder as in D. Horgan et al., "Distributed Prioritized Experience Replay", ICLR 2018): some
            games show what the policy does, others what it does not do any more.
        noise_colour: see `coloured_noise`.
        learner, league, shaping: see there.
        snapshot_every: episodes between two snapshots for the pool.
        evaluate_every, evaluation_games: env steps between two evaluations, and games of one against each anchor.
        checkpoint_every: env steps between two checkpoints.
        seconds: stop after so many seconds of training; None: train all steps.
    """

    seed: int = 0
    steps: int = 1_000_000
    environment: str | None = None
    games: int = 8
    warmup: int = 10_000
    ratio: float = 0.5
    batch: int = 128
    n_step: int = 8
    discount: float = 0.99
    capacity: int = 1_000_000
    prioritized: bool = True
    alpha: float = 0.6
    beta: float = 0.4
    both_sides: bool = True
    mirror: bool = True
    noise: tuple[float, float] = (0.05, 0.5)
    noise_colour: float = 1.0
    learner: TD3Settings = field(default_factory=TD3Settings)
    league: LeagueSettings = field(default_factory=lambda: LeagueSettings(anchor_share=0.75))
    shaping: Shaping = field(default_factory=Shaping)
    snapshot_every: int = 500
    evaluate_every: int = 50_000
    evaluation_games: int = 100
    checkpoint_every: int = 200_000
    seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Flat, for reports and trackers: parts as ``learner.NAME``."""
        flat: dict[str, Any] = {}
        for name, value in asdict(self).items():
            flat |= (
                {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
            )
        return flat
