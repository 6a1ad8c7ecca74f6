"""The photo editing environment: repair a degraded photo to raise a juror's score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

import cv2
import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.utils import seeding

from jurybox.studies.photo.environment import observation
from jurybox.studies.photo.environment.audit import distance, psnr, registered
from jurybox.studies.photo.environment.edits import TOOLS, Degradation, Edits, Image, apply, degrade, draw
from jurybox.studies.photo.environment.photos import Photo, PhotoLibrary, Split
from jurybox.studies.photo.environment.scorer import LocalScorer, Scorer, ServerScorer

Action = npt.NDArray[np.float32]

# The change that an action of 1 makes, in the units of Edits: about half the repair of a typical fault.
STEP_SIZES = np.array([0.8, 0.5, 0.6, 0.5, 0.25, 0.4, 8.0, 2.0, 0.1])
_PER_DEGREE, _PER_STOP_OF_CROP = 0.3, 5.0  # the weight of turning and cropping, in units of CIELAB
_SMALL = 96  # side of the pictures that are compared with the input, in pixels
AUDITED = 4  # one of this many episodes is audited, which takes as long as half of its scores


class PhotoEdit(gymnasium.Env[observation.Observation, Action]):
    """Repair a degraded photo in a few edit steps. The reward is the change of the juror's score.

    **Actions** are a ``Box(-1, 1, (9,))``: one small move of every tool at once, ``STEP_SIZES`` units each at full
    deflection, added to the recipe so far. Moves are used rather than settings because they close a loop: the
    picture that is seen is the picture that is moved, so "darker than it should be: lighten" is right at every step,
    under every recipe, and a nearly linear policy can represent it. All tools move together rather than one by one (a
    ``Discrete`` choice of tool and sign) because a verdict of the juror then teaches about nine tools at once, and
    four steps suffice where one tool at a time would need a dozen.

    **Observations** are the flat vector of :mod:`.observation`: statistics, the recipe, time, score, a small view.

    **Rewards** are ``reward_scale * (score after - score before)`` in shares of ``score_range``. They sum to the whole
    improvement, and a step that helps pays at once, so a small discount (0 to 0.5) learns fastest. With a ``price``
    the price of the edits so far is subtracted from the score, so that an edit pays only if it raises the juror's score
    by more than its price, and no edit is best for an intact photo.

    **The end**: an episode has exactly ``steps`` steps, and this is ``terminated``, never ``truncated``. The number of
    steps is part of the task, the time left is in the observation, and no reward lies beyond the end; a learner that
    bootstrapped there would count improvements that are impossible (Pardo et al., "Time Limits in Reinforcement
    Learning", ICML 2018).

    **Info** has ``score``, ``score_before`` (of the damaged photo), ``photo`` (name), ``edits`` and ``degradation``. At
    the end of every `AUDITED`-th episode it has ``audit``, too: by name, measures that are not rewarded, of the edited
    picture and (``NAME_before``) of the damaged one: ``psnr`` to the undamaged photo, and the audit jurors' scores.

    Args:
        scorer: scores what is rendered into its buffer; the environment closes it.
        auditors: by name, jurors whose scores are reported and never rewarded; the environment closes them.
        library: photos; those shipped with scikit-image and scikit-learn when None.
        split: which side of the library is used.
        steps: edit steps of an episode.
        strength: how badly photos are damaged; 1 is ordinary.
        reward_scale: see above.
        score_range: the juror's ordinary lowest and highest score; only a scale, scores may exceed it.
        price: score that is paid for each unit of CIELAB (about a just noticeable difference of colour) that the edits
            move the picture away from the given one, see `moved`.
        intact: share of the episodes that begin with an undamaged photo, for which no edit is best.
        tilted: share of the damaged photos without a tilt that get one in addition to their faults; otherwise a
            quarter are tilted, which is few to learn straightening from.
        lone: share of the damaged photos that have one fault instead of two to four, and so show it alone.
        seed: seeds the first episode and what follows, until ``reset(seed=...)`` says otherwise.
        render_mode: "rgb_array" or None.
    """

    # Gymnasium declares it without ClassVar, and a subclass may not add one.
    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012

    def __init__(
        self,
        scorer: Scorer,
        *,
        library: PhotoLibrary | None = None,
        split: Split = "training",
        steps: int = 4,
        strength: float = 1.0,
        reward_scale: float = 10.0,
        score_range: tuple[float, float] = (0.0, 1.0),
        seed: int | None = None,
        render_mode: str | None = None,
        auditors: Mapping[str, Scorer] | None = None,
        price: float = 0.0,
        intact: float = 0.0,
        tilted: float = 0.0,
        lone: float = 0.0,
    ) -> None:
        if steps < 1:
            raise ValueError(f"expected at least one edit step, got steps={steps}")
        if not score_range[0] < score_range[1]:
            raise ValueError(f"expected score_range to be (lowest, highest), got {score_range}")
        if not price >= 0.0:
            raise ValueError(f"expected a price of 0 or more, got {price}")
        for of, share in {"intact photos": intact, "tilted photos": tilted, "lone faults": lone}.items():
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"expected a share of {of} from 0 to 1, got {share}")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"expected render_mode to be 'rgb_array' or None, got {render_mode!r}")
        self.scorer = scorer
        self.auditors = dict(auditors or {})
        self.library = PhotoLibrary.shipped() if library is None else library
        self.split = split
        self.steps = steps
        self.strength = strength
        self.reward_scale = reward_scale
        self.price = price
        self.intact = intact
        self.tilted = tilted
        self.lone = lone
        self.render_mode = render_mode
        self.observation_space = cast("spaces.Space[observation.Observation]", observation.space())
        self.action_space = cast("spaces.Space[Action]", spaces.Box(-1.0, 1.0, (len(TOOLS),), np.float32))
        self._photos = {photo.name: photo for photo in self.library.of(split)}
        self._lowest, self._span = score_range[0], score_range[1] - score_range[0]
        self._photo: Photo | None = None
        self._damaged: Image | None = None
        self._small: Image | None = None
        self._undamaged: Image | None = None
        self._episodes = 0
        self._degradation = Degradation()
        self._edits = Edits()
        self._taken = 0
        self._score = self._score_before = self._paid = 0.0
        if seed is not None:
            self.np_random, self._np_random_seed = seeding.np_random(seed)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[observation.Observation, dict[str, Any]]:
        """Begin an episode with the next degraded photo.

        Args:
            seed: makes photo, crop and damage repeatable.
            options: ``{"photo": name}`` chooses the photo; crop and damage stay random. ``{"intact": True}`` does no
                damage, False does some. ``{"tilt": degrees}`` tilts a damaged photo counter-clockwise by that
                angle instead of the sampled one. ``{"degradation": settings}`` does that damage (`Degradation`'s
                fields by name) instead of a sampled one; the crop is the one that the seed has anyway.
        """
        super().reset(seed=seed)
        names = list(self._photos)
        drawn = names[int(self.np_random.integers(len(names)))]
        name = (options or {}).get("photo", drawn)
        if name not in self._photos:
            raise ValueError(f"no {self.split} photo is called {name!r}; there are {', '.join(names)}")
        self._photo = self._photos[name]
        crop = self._photo.crop(self.np_random)
        self._degradation = draw(self.np_random, self.strength, self.tilted, self.lone)
        if (given := (options or {}).get("degradation")) is not None:
            self._degradation = Degradation(**given)
        if (tilt := (options or {}).get("tilt")) is not None:
            self._degradation = replace(self._degradation, tilt=float(tilt))
        whole = (options or {}).get("intact")
        unsaid = whole is None and given is None
        if whole or (unsaid and self.intact and self.np_random.random() < self.intact):
            self._degradation = Degradation()
        self._undamaged, self._damaged = crop, degrade(crop, self._degradation)
        self._episodes += 1
        self._edits = Edits()
        self._taken = 0
        self._small = _shrunk(self._damaged)
        self._score = self._score_before = self._rendered_score()
        self._paid = 0.0
        return self._observation(), self._info()

    def step(self, action: Action) -> tuple[observation.Observation, float, bool, bool, dict[str, Any]]:
        """Move the tools; ``action`` is float (9,), clipped to [-1, 1]."""
        if self._damaged is None or self._taken >= self.steps:
            raise RuntimeError("no edit step is left: call reset() for the next photo")
        moves = np.asarray(action, dtype=np.float64)
        if moves.shape != (len(TOOLS),) or not np.isfinite(moves).all():
            raise ValueError(f"expected an action of {len(TOOLS)} finite numbers in [-1, 1], got {action!r}")
        self._edits = self._edits.moved(np.clip(moves, -1.0, 1.0) * STEP_SIZES)
        self._taken += 1
        before, self._score = self._score - self._paid, self._rendered_score()
        self._paid = self.price * self.moved() if self.price else 0.0
        reward = self.reward_scale * (self._score - self._paid - before) / self._span
        over = self._taken == self.steps
        seen, info = self._observation(), self._info()
        if over and self._episodes % AUDITED == 0:
            info["audit"] = self._audit()
        return seen, reward, over, False, info

    def render(self) -> Image | None:
        """A copy of the current picture, uint8 (384, 384, 3), when ``render_mode`` is "rgb_array"."""
        if self.render_mode is None or self._damaged is None:
            return None
        return self.picture()

    def picture(self) -> Image:
        """A copy of the current picture, uint8 (384, 384, 3)."""
        if self._damaged is None:
            raise RuntimeError("there is no picture yet: call reset() first")
        return apply(self._damaged, self._edits)

    def undamaged(self) -> Image:
        """A copy of the photo's crop before it was damaged, uint8 (384, 384, 3)."""
        if self._undamaged is None:
            raise RuntimeError("there is no picture yet: call reset() first")
        return self._undamaged.copy()

    def moved(self) -> float:
        """Return how far the edits moved the picture in the scorer's buffer from the damaged one.

        The mean distance in CIELAB of the two, turned and enlarged alike; each degree of turning and each stop of crop
        adds to it. 0 without edits.
        """
        assert self._small is not None
        turned = Edits(straighten=self._edits.straighten, crop=self._edits.crop)
        colours = (
            distance(_shrunk(self.scorer.buffer), apply(self._small, turned)) if any(self._edits.vector()) else 0.0
        )
        return colours + _PER_DEGREE * abs(turned.straighten) + _PER_STOP_OF_CROP * turned.crop

    def worth(self, damaged: Image, edits: Edits) -> float:
        """Return the value of a picture after these edits: its score minus the price."""
        self._damaged, self._small, self._edits = damaged, _shrunk(damaged), edits
        return self._rendered_score() - self.price * self.moved()

    def nearer(self) -> float:
        """Return by how many units of CIELAB the edits moved the damaged picture towards the undamaged photo."""
        assert self._damaged is not None and self._undamaged is not None
        tilt, distances = self._degradation.tilt, []
        for edits in (Edits(), self._edits):
            reference = registered(self._undamaged, tilt, edits.as_dict())
            distances.append(distance(_shrunk(apply(self._damaged, edits)), _shrunk(reference)))
        return distances[0] - distances[1]

    @property
    def photos(self) -> tuple[str, ...]:
        """Names of the photos of this split."""
        return tuple(self._photos)

    @property
    def edits(self) -> Edits:
        """The recipe so far."""
        return self._edits

    def close(self) -> None:
        """Close the scorers."""
        for scorer in (self.scorer, *self.auditors.values()):
            scorer.close()

    def _audit(self) -> dict[str, float]:
        assert self._damaged is not None and self._undamaged is not None
        tilt, found = self._degradation.tilt, {}
        for suffix, edits in (("_before", Edits()), ("", self._edits)):
            picture = apply(self._damaged, edits)
            found[f"psnr{suffix}"] = psnr(picture, registered(self._undamaged, tilt, edits.as_dict()))
            for name, auditor in self.auditors.items():
                np.copyto(auditor.buffer, picture)
                found[f"{name}{suffix}"] = auditor.score()
        return found

    def _rendered_score(self) -> float:
        assert self._damaged is not None
        apply(self._damaged, self._edits, out=self.scorer.buffer)
        return self.scorer.score()

    def _observation(self) -> observation.Observation:
        level = 2.0 * (self._score - self._lowest) / self._span - 1.0
        return observation.observe(self.scorer.buffer, self._edits, self._taken / self.steps, level)

    def _info(self) -> dict[str, Any]:
        assert self._photo is not None
        return {
            "score": self._score,
            "score_before": self._score_before,
            "photo": self._photo.name,
            "edits": self._edits.as_dict(),
            "degradation": self._degradation.as_dict(),
        }


def _shrunk(picture: Image) -> Image:
    return np.asarray(cv2.resize(picture, (_SMALL, _SMALL), interpolation=cv2.INTER_AREA), np.uint8)


@dataclass(frozen=True, slots=True)
class PhotoConfig:
    """Settings of an environment as strings and numbers, which can be sent to a worker.

    Attributes:
        scorer: "server" asks a running Jurybox server, "local" runs the juror in the worker itself (with torch).
        model: the juror's name on the server.
        address: the server's address; ``JURYBOX_ADDRESS`` or the default when None.
        timeout: seconds to wait for the server to appear, and for each score.
        juror: the factory of a local juror, ``"package.module:function"``, or of one that is loaded on the server.
        juror_args: the factory's keyword arguments, such as ``{"weights": "juror.safetensors"}``.
        photos: a folder of .jpg and .png; None means the photos shipped with scikit-image and scikit-learn.
        on_broken: what a broken file in that folder does, "error" or "skip".
        split: "training" or "held_out" photos.
        steps: edit steps of an episode.
        strength: how badly photos are damaged.
        reward_scale: reward for rising through the whole range of scores.
        lowest_score, highest_score: the juror's ordinary range.
        price: score that each unit of CIELAB costs by which the edits change the picture; 0: edits are free.
        intact: share of the episodes that begin with an undamaged photo; none in an evaluation, which has its own.
        tilted: share of the photos without a tilt that are given one in training; none in an evaluation.
        lone: share of the damaged photos with one fault instead of two to four in training; none in an evaluation.
        seed: environment i is seeded ``seed + i``.
        audit: jurors whose scores are logged and never rewarded: by name, the factory of each. With "server" it is
            the server's model of that name, and where there is none, it is loaded there for the time of the training.
        audit_models: by those names, the server's names where they differ.
    """

    scorer: Literal["server", "local"] = "server"
    model: str = "photo"
    address: str | None = None
    timeout: float = 30.0
    juror: str = "jurybox.server.jurors:panel"
    juror_args: dict[str, Any] = field(default_factory=dict)
    photos: str | None = None
    on_broken: Literal["error", "skip"] = "error"
    split: Split = "training"
    steps: int = 4
    strength: float = 1.0
    reward_scale: float = 10.0
    lowest_score: float = 0.0
    highest_score: float = 1.0
    price: float = 0.0
    intact: float = 0.0
    tilted: float = 0.0
    lone: float = 0.0
    seed: int = 0
    audit: dict[str, str] = field(default_factory=dict)
    audit_models: dict[str, str] = field(default_factory=dict)

    def held_out(self) -> PhotoConfig:
        """The same settings on the photos that training never sees."""
        return replace(self, split="held_out", intact=0.0, tilted=0.0, lone=0.0)


def make_environment(config: PhotoConfig, index: int) -> Callable[[], PhotoEdit]:
    """A picklable function that makes the i-th environment of a vector environment.

    Nothing is loaded and no server is asked until that function runs, in its own process.
    """
    return partial(build, config, index)


def build(config: PhotoConfig, index: int = 0) -> PhotoEdit:
    """Make one environment.

    Raises:
        PhotoError: when the photos cannot be used.
        ScorerError: when a local juror cannot be made; a server's are raised at the first ``reset``.
    """
    # One thread per worker: OpenCV would otherwise start a thread pool in every one.
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
        auditors=make_auditors(config),
        price=config.price,
        intact=config.intact,
        tilted=config.tilted,
        lone=config.lone,
    )


def played(*, render_mode: str | None = None, **config: Any) -> PhotoEdit:
    """Make one environment from `PhotoConfig`'s fields by name, for playing a policy."""
    environment = build(PhotoConfig(**config))
    environment.render_mode = render_mode
    return environment


def make_auditors(config: PhotoConfig) -> dict[str, Scorer]:
    """The audit jurors of the settings, by name."""
    if config.scorer == "local":
        return {name: LocalScorer(factory, threads=1) for name, factory in config.audit.items()}
    models = {name: config.audit_models.get(name, name) for name in config.audit}
    return {name: ServerScorer(model, config.address, timeout=config.timeout) for name, model in models.items()}


def make_scorer(config: PhotoConfig) -> Scorer:
    """Make the scorer of the settings; one of a server connects at its first use."""
    if config.scorer == "server":
        return ServerScorer(config.model, config.address, timeout=config.timeout)
    if config.scorer == "local":
        return LocalScorer(config.juror, config.juror_args, threads=1)
    raise ValueError(f"expected scorer to be 'server' or 'local', got {config.scorer!r}")
