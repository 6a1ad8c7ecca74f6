"""From plain settings to environments in worker processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import cv2

from .environment import PhotoEdit
from .photos import PhotoLibrary, Split
from .scorer import LocalScorer, Scorer, ServerScorer


@dataclass(frozen=True, slots=True)
class PhotoConfig:
    """Everything an environment is made of, as strings and numbers: it crosses to a spawned worker as it is.

    Attributes:
        scorer: "server" asks a running Jurybox server, "local" runs the juror in the worker itself (with torch).
        model: the juror's name on the server.
        address: the server's address; ``JURYBOX_ADDRESS`` or the default when None.
        timeout: seconds to wait for the server to appear, and for each score.
        juror: the factory of a local juror, ``"package.module:function"``.
        photos: a folder of .jpg and .png; None means the photos shipped with scikit-image and scikit-learn.
        on_broken: what a broken file in that folder does, "error" or "skip".
        split: "training" or "held_out" photos.
        steps: edit steps of an episode.
        strength: how badly photos are damaged.
        reward_scale: reward for rising through the whole range of scores.
        lowest_score, highest_score: the juror's ordinary range.
        seed: environment i is seeded ``seed + i``.
    """

    scorer: Literal["server", "local"] = "server"
    model: str = "photo"
    address: str | None = None
    timeout: float = 30.0
    juror: str = "jurybox.server.jurors:panel"
    photos: str | None = None
    on_broken: Literal["error", "skip"] = "error"
    split: Split = "training"
    steps: int = 4
    strength: float = 1.0
    reward_scale: float = 10.0
    lowest_score: float = 0.0
    highest_score: float = 1.0
    seed: int = 0

    def held_out(self) -> PhotoConfig:
        """The same settings on the photos that training never sees."""
        return replace(self, split="held_out")


def make_environment(config: PhotoConfig, index: int) -> Callable[[], PhotoEdit]:
    """What a vector environment wants of its i-th environment: a picklable function that makes it.

    Nothing is loaded and no server is asked until that function runs, in its own process.
    """
    return partial(build, config, index)


def build(config: PhotoConfig, index: int = 0) -> PhotoEdit:
    """Make one environment here.

    Raises:
        PhotoError: when the photos cannot be used.
        ScorerError: when a local juror cannot be made; a server's are raised at the first ``reset``.
    """
    # One thread a worker: OpenCV would otherwise start a pool of its own in every one of them.
    cv2.setNumThreads(0)
    return PhotoEdit(
        make_scorer(config),
        library=None if config.photos is None else PhotoLibrary.from_folder(config.photos, on_broken=config.on_broken),
        split=config.split,
        steps=config.steps,
        strength=config.strength,
        reward_scale=config.reward_scale,
        score_range=(config.lowest_score, config.highest_score),
        seed=config.seed + index,
        render_mode="rgb_array",
    )


def make_scorer(config: PhotoConfig) -> Scorer:
    """The scorer that the settings ask for; the server's connects when it is first used."""
    if config.scorer == "server":
        return ServerScorer(config.model, config.address, timeout=config.timeout)
    if config.scorer == "local":
        return LocalScorer(config.juror, threads=1)
    raise ValueError(f"expected scorer to be 'server' or 'local', got {config.scorer!r}")
