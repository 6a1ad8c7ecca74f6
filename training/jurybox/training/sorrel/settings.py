"""The part of a sorrel configuration that says how it runs in processes: ``config.multiprocessing``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jurybox.training.runtime.plan import RunError


class SorrelError(RunError):
    """An environment, or its configuration, that cannot run in processes; the message says why."""


class Multiprocessing(BaseModel):
    """Settings beside those that sorrel has; without `enabled` the experiment runs as sorrel runs it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = False
    publish_mode: Literal["double_buffer", "snapshot"] = "double_buffer"
    publish_interval: int = Field(10, ge=0, description="Learner steps between two publications; 0: only the first.")
    buffer_capacity: int = Field(10_000, ge=1, description="Rows on their way from the actor to a learner.")
    train_interval: int = Field(4, ge=1, description="Turns for one train_step; on-policy models take whole epochs.")
    learning_starts: int = Field(100, ge=0, description="Turns before the first train_step.")
    learner_nice: int = Field(10, ge=0, le=19, description="By how much learners give way to the actor.")
    max_ahead: int | None = Field(None, ge=0, description="Turns that the actor may be ahead; none: it never waits.")
    max_lag: int | None = Field(None, ge=0, description="Publications that the actor may be behind.")
    actor_timeout: float = Field(30.0, gt=0, description="Seconds without a sign of life.")
    learner_timeout: float = Field(60.0, gt=0)
    checkpoint_interval: int = Field(0, ge=0, description="Turns between two checkpoints; 0: one at the end.")
    seed: int = Field(0, ge=0)
    log_interval: int = Field(100, ge=1, description="Turns between two rows of metrics.")
    log_dir: Path = Path("sorrel-out")

    @classmethod
    def of(cls, config: Any) -> Multiprocessing:
        """The settings in a sorrel configuration (an OmegaConf DictConfig); the defaults where there are none.

        Raises:
            SorrelError: one is unknown or out of its bounds.
        """
        said = config.get("multiprocessing") or {}
        try:
            return cls(**{str(name): said[name] for name in said})
        except ValidationError as error:
            told = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise SorrelError(f"config.multiprocessing: {told}") from error
