"""The settings of a hockey training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from jurybox.studies.hockey.league import LeagueSettings
from jurybox.training.runtime.plan import Pace, check_learns
from jurybox.training.runtime.settings import NOT_COMPILED, Compile, EnvironmentSettings


@dataclass(frozen=True, slots=True)
class Shaping:
    """Weights of a step's reward terms for the learner. Reported returns always use the environment's own reward.

    Attributes:
        closeness: weight of the environment's penalty for keeping away from a puck in the player's own half; 1 is the
            environment's own weight.
        touch: reward for a catch.
        direction: weight of the speed at which the puck moves towards the opponent's goal; with 10, moving it through
            the whole rink is worth a fifteenth of a goal.
    """

    closeness: float = 1.0
    touch: float = 0.0
    direction: float = 10.0


# Names in the plan: its two replays, its channel and its folder.
CHANNEL = ROWS = "policy"
RESULTS, POOL = "results", "pool"
LEAVING = 8  # past selves that are kept after they have left the league: a collector may just have drawn one


class HockeyTraining(EnvironmentSettings):
    """Settings of a hockey training; a TOML file and the command line use the same names."""

    title = "hockey"
    ways: ClassVar = {
        "dual_buffer": "anchor_size rows are kept for games against bots, and anchor_ratio of a batch comes from them",
        "environment": "it is env here",
        "noise": "it is action_noise here",
        "noise_colour": "it is noise_color here",
        "both_sides": "it is record_opponents here",
        "envs_per_worker": "envs is the number of games over all workers",
        "envs_per_collector": "envs is the number of games over all workers",
        "num_envs_per_worker": "envs is the number of games over all workers",
        "learner": "its settings have no prefix here: hidden, learning_rate, critic_learning_rate, tau ...",
        "actor_lr": "it is learning_rate here",
        "actor_learning_rate": "it is learning_rate here",
        "critic_lr": "it is critic_learning_rate here",
        "pool_size": "it is league.pool here",
    }
    # Settings that may change when a run is resumed: its length, where the work is done, and what is recorded.
    may_change = (
        *("steps", "seconds", "target", "workers", "envs", "policy", "device", "compile", "learner_gpus"),
        "engine_gpus",
        *("server", "server_http", "server_group", "reset_timeout", "check_steps"),
        *("max_ahead", "publish_interval", "weight_sync_interval", "max_lag", "evaluate_every", "evaluation_games"),
        *("matrix_games", "film_games", "checkpoint_every", "log_every", "on_failure"),
    )

    steps: int = Field(40_000_000, ge=1, description="Total env steps: steps of games, not of players.")
    seconds: float | None = Field(None, gt=0, description="Stop after this many seconds.")
    target: float | None = Field(None, ge=-1, le=1, description="Stop when an evaluation reaches this score.")

    env: str | None = Field(
        None, description="Environment class, module:Class, with the original's constructor; none: this package's own."
    )
    mode: Literal[0, 1, 2] = Field(0, description="0: whole games, 1: shooting, 2: defence.")
    workers: int = Field(1, ge=1, description="Number of collector processes.")
    envs: int | None = Field(None, ge=2, description="Number of games, over all workers; none: 8 per worker.")

    learning_starts: int = Field(10_000, ge=1, description="Env steps with random actions and without learning.")
    # A compiled learner step costs as much as ten env steps: with eight of these for each, both processes are busy.
    train_freq: int = Field(8, ge=1, description="Env steps per `gradient_steps` learner steps.")
    gradient_steps: int = Field(1, ge=1, description="Learner steps per `train_freq` env steps.")
    max_ahead: Annotated[int, Field(ge=0)] | Literal["none"] = Field(
        2000,
        description="Env steps by which collectors may be ahead of the learner; none: neither waits for the other.",
    )
    publish_interval: int = Field(
        50, ge=1, description="Learner steps between two publications; collectors look every `weight_sync_interval`."
    )
    weight_sync_interval: int = Field(
        10, ge=1, description="Collector steps between two looks for weights, published every `publish_interval`."
    )
    max_lag: int | None = Field(
        20, ge=0, description="Publications by which a collector may lag before it fetches the weights."
    )

    batch_size: int = Field(128, ge=2, description="Transitions in one optimiser step.")
    n_steps: int = Field(8, ge=1, description="Steps of the n-step return.")
    gamma: float = Field(0.99, ge=0, le=1, description="Discount factor.")
    buffer_size: int = Field(1_000_000, ge=1, description="Capacity of the replay, in rows.")
    # The dual buffer: games against bots remain available, however many games against past selves follow.
    anchor_size: int = Field(
        0, ge=0, description="Rows kept for games against anchors; other games do not overwrite them."
    )
    anchor_ratio: float = Field(0.25, ge=0, le=1, description="Share of each batch that comes from anchor games.")
    prioritized: bool = Field(True, description="Sample transitions by their priorities; else uniformly.")
    alpha: float = Field(0.6, ge=0, le=1, description="The exponent of the priorities.")
    beta: float = Field(0.4, ge=0, le=1, description="The exponent of the importance weights.")
    record_opponents: bool = Field(
        True, description="Store the opponents' transitions, too; the learner is off-policy."
    )
    mirror: bool = Field(True, description="Mirror half of each sample left to right: the game is symmetric.")
    # A different level for each game, as in D. Horgan et al., "Distributed Prioritized Experience Replay", ICLR 2018:
    # some games show the current behaviour, others actions that the policy no longer takes.
    action_noise: tuple[float, float] = Field(
        (0.05, 0.5), description="Scale of the exploration noise in the first and in the last game of a worker."
    )
    noise_color: float = Field(1.0, ge=0, description="Exponent of the noise spectrum: 0 white, 1 pink.")
    device: str = Field("cpu", description="Device of the learner.")
    compile: Compile = "auto"
    learner_gpus: float = Field(0, ge=0, description="GPUs that --launcher ray reserves for the learner.")
    engine_gpus: float = Field(
        0, ge=0, description="GPUs that --launcher ray reserves for the engine of a served policy."
    )

    # Of TD3, see its settings.
    hidden: tuple[int, ...] = Field(
        (128, 128), min_length=1, description="Sizes of the hidden layers of every network."
    )
    learning_rate: float = Field(5e-4, gt=0, description="Learning rate of Adam, of the policy.")
    critic_learning_rate: float = Field(1e-3, gt=0, description="The same of the critics.")
    tau: float = Field(0.005, gt=0, le=1, description="Coefficient of the soft update of target networks.")
    policy_delay: int = Field(2, ge=1, description="Critic steps per actor step.")
    target_policy_noise: float = Field(0.2, ge=0, description="Standard deviation of the noise on target actions.")
    target_noise_clip: float = Field(0.5, ge=0, description="Bound of that noise.")
    pre_tanh_penalty: float = Field(
        0.001,
        ge=0,
        description="Weight of the squared input, beyond 1, of the policy's last tanh: actions at their bounds "
        "have no gradient. 0 is plain TD3.",
    )
    reward_scale: float = Field(0.1, gt=0, description="Rewards are multiplied by it.")
    league: LeagueSettings = LeagueSettings(anchor_share=0.75)
    shaping: Shaping = Shaping()
    snapshot_every: int = Field(2000, ge=1, description="Episodes between two snapshots for the pool.")
    evaluate_every: int = Field(500_000, ge=0, description="Env steps between two evaluations; 0: one at the end.")
    evaluation_games: int = Field(100, ge=1, description="Games per evaluation against each anchor.")
    matrix_games: int = Field(20, ge=0, description="Games per pair in the win matrix of the report; 0: no matrix.")
    film_games: int = Field(2, ge=0, description="Games in the animation of the report; 0: none.")
    checkpoint_every: int = Field(1_000_000, ge=0, description="Env steps between two checkpoints; 0: one at the end.")
    log_every: int = Field(20_000, ge=1, description="Env steps between two rows of metrics.")
    on_failure: Literal["end", "serial"] = Field("end", description="What to do when a process has failed too often.")

    @model_validator(mode="after")
    def _check_consistency(self) -> HockeyTraining:
        if self.envs is not None and (self.envs % self.workers or self.envs < 2 * self.workers):
            raise ValueError(
                f"envs={self.envs} with workers={self.workers}: expected the same number of games for each, two or more"
            )
        if self.free and self.max_lag is None:
            raise ValueError('max_ahead="none" without max_lag: nothing would limit the age of collectors\' policies')
        if 0 < self.anchor_size < self.least_kept:
            raise ValueError(
                f"anchor_size={self.anchor_size}: expected 0, or at least {self.least_kept}: in a smaller one too "
                f"few rows could be sampled, with this number of games and n_steps={self.n_steps}"
            )
        rows = self.unsampled + 1  # a step of a game adds one for each player that is recorded
        rows = -(-rows // (2 if self.record_opponents else 1))
        due = self.pace.env_steps(0, 0)
        waits = ("learning_starts", "train_freq") if due >= rows else ("n_steps", "envs")
        check_learns(self.steps, max(due, rows), {name: getattr(self, name) for name in waits})
        return self

    @property
    def free(self) -> bool:
        """Whether collectors and learner run without waiting for each other."""
        return self.max_ahead == "none"

    @property
    def pace(self) -> Pace:
        """The ratio of learner steps to env steps, which only a serial run keeps in the free mode."""
        slack = None if self.max_ahead == "none" else self.max_ahead
        return Pace(self.train_freq, self.gradient_steps, self.learning_starts, slack, free=self.free)

    @property
    def envs_per_worker(self) -> int:
        """Games of each collector; one half steps while actions for the other are computed."""
        return 8 if self.envs is None else self.envs // self.workers

    @property
    def least_kept(self) -> int:
        """Rows that the anchor needs before any are sampled.

        Then three in four can be sampled: all but the newest `n_steps` of each game.
        """
        return 4 * self.unsampled

    @property
    def unsampled(self) -> int:
        """The most rows that a replay can hold of which none can be sampled: the newest of each game."""
        return self.workers * self.envs_per_worker * (2 if self.record_opponents else 1) * (self.n_steps + 1)

    def unused(self) -> dict[str, str]:
        """Return the settings that have no effect with the others, and why; those of parts are ``league.NAME``."""
        unused = super().unused()
        if not self.anchor_size:
            unused["anchor_ratio"] = "anchor_size is 0, so no rows are kept"
        if not self.prioritized:
            unused |= dict.fromkeys(("alpha", "beta"), "prioritized is false")
        if self.league.weighting != "hard":
            unused["league.hardness"] = f"league.weighting is {self.league.weighting}"
        if not self.league.pool:
            names = ("snapshot_every", *(f"league.{name}" for name in ("anchor_share", "weighting", "least_games")))
            unused |= dict.fromkeys(names, "league.pool is 0, so there are no past selves")
        if self.env is not None and self.film_games:
            unused["film_games"] = "only games of this package's own environment are filmed"
        if self.policy == "local":
            unused["engine_gpus"] = "policy is local, so there is no engine"
        if self.build_once:
            unused["matrix_games"] = "build_once is true, and there is no game beside those of the training"
        if self.free:
            unused |= dict.fromkeys(("train_freq", "gradient_steps"), 'max_ahead is "none", so there is no ratio')
        if self.device == "cpu":
            unused["learner_gpus"] = 'device is "cpu": the learner would not use them'
        else:
            unused["compile"] = NOT_COMPILED
        return unused
