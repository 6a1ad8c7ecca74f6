"""Compares policies on the same degraded photos."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from jurybox.studies.photo.environment.edits import TOOLS, Image
from jurybox.studies.photo.environment.observation import Observation
from jurybox.studies.photo.environment.photo_edit import Action, PhotoEdit

__all__ = ["evaluate"]

Policy = Callable[[Observation], Action]
_APART = 10_000_000  # between the seeds of two photos: more than any number of seeds in use


@dataclass(frozen=True, slots=True)
class EditedEpisode:
    """One damaged photo, edited to the end.

    Attributes:
        photo: the photo's name.
        seed: what crop and damage were drawn from.
        scores: the damaged photo's score and that after each step.
        edits: the final recipe.
        degradation: what had been done to the photo.
        undamaged, damaged, edited: the pictures, uint8 (384, 384, 3).
    """

    photo: str
    seed: int
    scores: tuple[float, ...]
    edits: Mapping[str, float]
    degradation: Mapping[str, float]
    undamaged: Image
    damaged: Image
    edited: Image

    @property
    def before(self) -> float:
        """The damaged photo's score."""
        return self.scores[0]

    @property
    def after(self) -> float:
        """The edited photo's score."""
        return self.scores[-1]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The outcomes of one policy, photo by photo and seed by seed."""

    outcomes: tuple[EditedEpisode, ...]

    @property
    def before(self) -> float:
        """Mean score of the damaged photos."""
        return float(np.mean([outcome.before for outcome in self.outcomes]))

    @property
    def after(self) -> float:
        """Mean score of the edited photos."""
        return float(np.mean([outcome.after for outcome in self.outcomes]))

    @property
    def improvement(self) -> float:
        """Mean score of the edited photos minus that of the damaged ones."""
        return self.after - self.before


def evaluate(environment: PhotoEdit, policy: Policy, seeds: Iterable[int], *, intact: bool = False) -> Evaluation:
    """Evaluate a policy on all photos of the environment's split, degraded once for each seed.

    What a seed damages, and how, depends on the photo and the seed alone, so evaluations with the same seeds are
    comparable picture by picture. The environment's own random stream is left at the last seed.

    Args:
        environment: usually of held-out photos, ``build(config.held_out())``.
        policy: from an observation to an action.
        seeds: one damaged copy of each photo for each of them.
        intact: leave the photos as they are: the same crops, undamaged.

    Raises:
        ValueError: when there are no seeds.
    """
    # A generator draws the same damage for every photo from one number, so each photo has numbers of its own.
    outcomes = [
        _edit(environment, policy, photo, seed + _APART * number, intact)
        for seed in seeds
        for number, photo in enumerate(environment.photos)
    ]
    if not outcomes:
        raise ValueError("expected at least one seed to damage the photos with")
    return Evaluation(tuple(outcomes))


def _edit(environment: PhotoEdit, policy: Policy, photo: str, seed: int, intact: bool) -> EditedEpisode:
    seen, info = environment.reset(seed=seed, options={"photo": photo, "intact": intact})
    damaged = environment.picture()
    scores = [info["score"]]
    over = False
    while not over:
        seen, _, terminated, truncated, info = environment.step(policy(seen))
        scores.append(info["score"])
        over = terminated or truncated
    return EditedEpisode(
        photo=photo,
        seed=seed,
        scores=tuple(scores),
        edits=info["edits"],
        degradation=info["degradation"],
        undamaged=environment.undamaged(),
        damaged=damaged,
        edited=environment.picture(),
    )


@dataclass(frozen=True, slots=True)
class Straightened:
    """By how much a policy turned a tilted picture.

    Attributes:
        photo, seed: what crop and other faults were drawn from.
        tilt: the photo's tilt in degrees, counter-clockwise. straighten: the policy's turn in degrees.
    """

    photo: str
    seed: int
    tilt: float
    straighten: float


def straighten(environment: PhotoEdit, policy: Policy, angles: Mapping[int, float]) -> list[Straightened]:
    """Let a policy edit every photo of the environment's split, tilted to both sides by the same angle.

    The two pictures of a pair have the same crop and the same other faults. So neither a photo's own tilt nor a
    policy's bias to one side can look like an answer to the tilt.

    Args:
        angles: degrees by seed; every photo is tilted by each of them.

    Returns:
        Two for each photo and seed, the one that was tilted counter-clockwise first.
    """
    found = []
    for seed, angle in angles.items():
        for number, photo in enumerate(environment.photos):
            for tilt in (angle, -angle):
                drawn = seed + _APART * number
                seen, info = environment.reset(seed=drawn, options={"photo": photo, "intact": False, "tilt": tilt})
                over = False
                while not over:
                    seen, _, terminated, truncated, info = environment.step(policy(seen))
                    over = terminated or truncated
                found.append(Straightened(photo, drawn, tilt, info["edits"]["straighten"]))
    return found


def no_edits(observation: Observation) -> Action:
    """The policy that leaves every photo as it is."""
    return np.zeros(len(TOOLS), dtype=np.float32)


class RandomEdits:
    """The policy that moves every tool at random, uniformly over the action space."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, observation: Observation) -> Action:
        return self._rng.uniform(-1.0, 1.0, len(TOOLS)).astype(np.float32)
