"""Evaluation of a photo policy: the same degraded photos unedited, edited at random, and edited by the policy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.client import connect
from jurybox.studies.photo.environment import (
    EditedEpisode,
    PhotoConfig,
    RandomEdits,
    evaluate,
)
from jurybox.studies.photo.environment.audit import Perceptual, measure, registered
from jurybox.studies.photo.environment.evaluate import Policy, Straightened, straighten
from jurybox.studies.photo.environment.observation import Observation
from jurybox.studies.photo.environment.photo_edit import Action
from jurybox.studies.photo.environment.scorer import LocalScorer
from jurybox.studies.photo.worker import environment_maker
from jurybox.training import interrupts
from jurybox.training.checkpoints import write_table
from jurybox.training.report.verdict import ENOUGH_GROUPS, Interval, interval
from jurybox.training.trainings.progress import Watcher

Picture = npt.NDArray[np.uint8]
Marks = Mapping[str, npt.NDArray[np.float64]]
Judge = Callable[[Sequence[Picture]], Marks]

# The versions of a damaged photo, in the order in which they are shown; the original is the reference.
KINDS = ("no edits", "random edits", "learned", "original")
_FIRST_SEED = 1_000_000  # far from the seeds of the training's environments
_GENTLEST, _STEEPEST = 3.0, 9.0  # range of the tilts for measuring straightening, in degrees, as in the degradation
_THREADS = 8  # each has one picture in flight, so the server can form batches


@dataclass(frozen=True, slots=True)
class Case:
    """One damaged photo.

    Attributes:
        photo: name of the photo.
        seed: seed that the crop and the damage were drawn from.
        pictures: uint8 (384, 384, 3), by kind.
        marks: all outputs of the juror, by kind and name; "score" is the one that was trained on.
        audit: measures that the training did not use, by kind and name: distances from the undamaged photo, and the
            scores of the audit jurors. The original has only the scores.
        degradation: the damage.
        edits: the learned policy's edits.
    """

    photo: str
    seed: int
    pictures: Mapping[str, Picture]
    marks: Mapping[str, Mapping[str, float]]
    audit: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    degradation: Mapping[str, float] = field(default_factory=dict)
    edits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Intact:
    """The learned policy's edit of an undamaged photo.

    Attributes:
        photo, seed: as in `Case`.
        picture, edited: the picture before and after the edits.
        before, after: scores.
        audit: distances of the edited picture from the photo.
    """

    photo: str
    seed: int
    picture: Picture
    edited: Picture
    before: float
    after: float
    audit: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Straightening:
    """How well a policy straightens, measured on photos that were tilted to both sides.

    Attributes:
        pictures, photos: number of pictures, and of the photos that they were made from.
        follows: correlation between the policy's rotation and the negative tilt over all pictures (-1 to 1). The
            photos' own tilt remains in it as an error.
        undone: share of the tilt that is undone: half the difference of the two rotations of a pair, divided by the
            tilt. The photos' own tilt cancels out.
        before: mean absolute tilt, degrees.
        left: mean absolute tilt after the edits, degrees.

    The intervals are 95 % percentile bootstrap intervals over photos, or over pairs if there are few photos.
    """

    pictures: int
    photos: int
    follows: Interval
    undone: Interval
    before: float
    left: float


def straightening_of(tilted: Sequence[Straightened]) -> Straightening | None:
    """Compute how well a policy straightens from pairs of tilted pictures; None without pictures.

    Raises:
        ValueError: a picture was not tilted to both sides by the same angle, so that the photo's own tilt would bias
            the result.
    """
    if not tilted:
        return None
    by_pair: dict[tuple[str, int], list[Straightened]] = {}
    for each in tilted:
        by_pair.setdefault((each.photo, each.seed), []).append(each)
    for (name, seed), pair in by_pair.items():
        if len(pair) != 2 or pair[0].tilt != -pair[1].tilt or not pair[0].tilt:
            got = ", ".join(f"{each.tilt:g}" for each in pair)
            raise ValueError(f"expected {name} of seed {seed} to be tilted to both sides by one angle, got {got}")
    pairs = np.array([[(-each.tilt, each.straighten) for each in pair] for pair in by_pair.values()])  # (n, 2, 2)
    photos = [photo for photo, _ in by_pair]
    tilts, turns = pairs[..., 0], pairs[..., 1]
    shares = (turns[:, 0] - turns[:, 1]) / (tilts[:, 0] - tilts[:, 1])
    labels = photos if len(set(photos)) >= ENOUGH_GROUPS else list(range(len(pairs)))
    return Straightening(
        len(tilted),
        len(set(photos)),
        _follows(pairs, labels),
        interval(shares, photos) if len(shares) > 1 else Interval(*3 * (float(shares.mean()),)),
        float(np.abs(tilts).mean()),
        float(np.abs(turns - tilts).mean()),
    )


def _follows(pairs: npt.NDArray[np.float64], labels: Sequence[Any]) -> Interval:
    """Return Pearson's correlation over all pictures, and its bootstrap interval over labelled groups of pairs.

    Args:
        pairs: float64 (n, 2, 2): pair, side, and negative tilt or rotation.
        labels: the group of each pair.
    """
    tilts, turns = pairs[..., 0], pairs[..., 1]
    # One column of sums for each pair. The correlation of any resample follows from the total of its columns.
    sums = np.stack(
        [np.full(len(pairs), 2.0), turns.sum(1), (turns**2).sum(1), (tilts**2).sum(1), (tilts * turns).sum(1)]
    )
    names = list(dict.fromkeys(labels))
    groups = np.stack([sums[:, [label == name for label in labels]].sum(1) for name in names])

    def correlation(total: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        n, turned, squares, steep, both = np.moveaxis(total, -1, 0)
        spread = np.sqrt(np.maximum(steep * (squares - turned**2 / n), 0.0))  # the tilts' mean is exactly 0
        found: npt.NDArray[np.float64] = np.divide(both, spread, out=np.zeros_like(both), where=spread > 1e-9)
        return found

    chosen = np.random.default_rng(0).integers(len(names), size=(10_000, len(names)))
    return Interval.of(correlation(groups.sum(0)[None])[0], correlation(groups[chosen].sum(1)))


@dataclass(frozen=True, slots=True)
class PhotoEvaluation:
    """The results of an evaluation.

    Attributes:
        cases: the damaged photos, by seed and then by photo.
        intact: the undamaged photos.
        tilted: the photos that were tilted to both sides.
    """

    cases: tuple[Case, ...]
    intact: tuple[Intact, ...] = ()
    tilted: tuple[Straightened, ...] = ()

    def scores(self, kind: str, criterion: str = "score") -> npt.NDArray[np.float64]:
        """Return the juror's outputs for one kind, float64 (cases,)."""
        return np.array([case.marks[kind][criterion] for case in self.cases])

    def audited(self, kind: str, name: str) -> npt.NDArray[np.float64]:
        """Return an audited measure, which was not rewarded, for one kind: float64 (cases,)."""
        return np.array([case.audit[kind][name] for case in self.cases])

    @property
    def photos(self) -> list[str]:
        """The photo's name for every case."""
        return [case.photo for case in self.cases]

    @property
    def criteria(self) -> tuple[str, ...]:
        """Names of the juror's outputs other than the score."""
        return tuple(name for name in self.cases[0].marks["learned"] if name != "score")

    def save(self, path: Path) -> None:
        """Write a CSV file with one line for each case, kind and criterion."""
        rows: list[tuple[str, int, str, str, str]] = []
        for case in self.cases:
            for kind, marks in case.marks.items():
                marked = {**marks, **{f"audit_{name}": mark for name, mark in case.audit.get(kind, {}).items()}}
                rows += ((case.photo, case.seed, kind, name, f"{mark:.5f}") for name, mark in marked.items())
        for each in self.intact:
            marked = {"score": each.after, **{f"audit_{name}": mark for name, mark in each.audit.items()}}
            rows.append((each.photo, each.seed, "intact", "score", f"{each.before:.5f}"))
            rows += ((each.photo, each.seed, "intact, learned", name, f"{m:.5f}") for name, m in marked.items())
        for turned in self.tilted:
            side = "counter-clockwise" if turned.tilt > 0 else "clockwise"
            for name, degrees in (("tilt", turned.tilt), ("straighten", turned.straighten)):
                rows.append((turned.photo, turned.seed, f"tilted {side}, learned", name, f"{degrees:.5f}"))
        write_table(path, ("photo", "seed", "kind", "criterion", "mark"), rows)


def evaluate_policy(
    config: PhotoConfig,
    policy: Policy,
    damages: int,
    watcher: Watcher,
    *,
    perceptual: Perceptual | None = None,
) -> PhotoEvaluation:
    """Evaluate the learned and a random policy on all held-out photos, degraded in `damages` ways, and audit them.

    For every second seed, the learned policy also edits the undamaged photos, and damaged ones tilted to both sides
    (`angles_of`). Of the latter, only the rotations are kept.

    Args:
        config: settings of the training's environment; its held-out photos are used.
        policy: the learned policy; called from several threads.
        damages: number of seeds of degradation, which are the same for every policy.
        perceptual: a learned distance between two pictures, for the audit.

    Raises:
        ValueError: `damages` is less than one.
        KeyboardInterrupt: the evaluation was interrupted.
    """
    if damages < 1:
        raise ValueError(f"expected at least one seed of degradation, got {damages}")
    held_out = config.held_out()
    seeds = [_FIRST_SEED + number for number in range(damages)]
    angles = angles_of(seeds)
    threads = 1 if config.scorer == "local" else min(_THREADS, damages)
    stopped = threading.Event()
    edited: list[int] = []
    turned: list[Straightened] = []
    watcher.begin("evaluating", damages)

    def share(number: int) -> list[_Edited]:
        environment = environment_maker(replace(held_out, audit={}), number, timeout=0.0)()
        if number == 0 and environment.library.left_out:
            watcher.log(environment.library.left_out)
        try:
            found: list[_Edited] = []
            for seed in seeds[number::threads]:
                mend = _unless(stopped, policy)
                learned = evaluate(environment, mend, [seed]).outcomes
                random = evaluate(environment, _unless(stopped, RandomEdits(seed)), [seed]).outcomes
                whole: Sequence[EditedEpisode | None] = [None] * len(learned)
                if seed in angles:
                    whole = evaluate(environment, mend, [seed], intact=True).outcomes
                    turned.extend(straighten(environment, mend, {seed: angles[seed]}))
                found += zip(learned, random, whole, strict=True)
                edited.append(seed)
            return found
        finally:
            environment.close()

    with ThreadPoolExecutor(threads) as pool:
        try:  # before the first thread starts: after Ctrl-C the pool waits for all of them
            futures = [pool.submit(share, number) for number in range(threads)]
            waiting = set(futures)
            while waiting:
                interrupts.check()
                finished, waiting = wait(waiting, timeout=0.2)
                watcher.advance(len(edited))
                for future in finished:
                    future.result()
            results = [result for future in futures for result in future.result()]
        finally:
            stopped.set()  # after an error, the other threads stop early
            watcher.end()
    results.sort(key=lambda result: (result[0].seed, result[0].photo))
    with judge(config) as rate:
        return PhotoEvaluation(
            tuple(_case(learned, random, rate, perceptual) for learned, random, _ in results),
            tuple(_intact(whole, perceptual) for _, _, whole in results if whole is not None),
            tuple(sorted(turned, key=lambda each: (each.seed, each.photo, -each.tilt))),
        )


def angles_of(seeds: Sequence[int]) -> dict[int, float]:
    """Return the angle that photos are tilted by to both sides, for every second seed: evenly from 3 to 9 degrees."""
    chosen = [seed for seed in seeds if seed % 2 == 0]
    spread = (_STEEPEST - _GENTLEST) / max(1, len(chosen))
    return {seed: _GENTLEST + (number + 0.5) * spread for number, seed in enumerate(chosen)}


@contextmanager
def judge(config: PhotoConfig) -> Iterator[Judge]:
    """Create a function that returns the juror's outputs for pictures. Use it in a ``with`` statement.

    The scores of audit jurors are among them as ``audit_NAME``.
    """
    if config.scorer == "local":
        scorers = {"score": LocalScorer(config.juror, config.juror_args, threads=1)}
        scorers |= {f"audit_{name}": LocalScorer(factory, threads=1) for name, factory in config.audit.items()}
        yield lambda pictures: {name: _locally(scorer, pictures) for name, scorer in scorers.items()}
        return
    with connect(config.address, timeout=config.timeout) as server:
        model = server.model(config.model, rows=len(KINDS))
        auditors = {name: server.model(config.audit_models.get(name, name), rows=len(KINDS)) for name in config.audit}

        def rate(pictures: Sequence[Picture]) -> Marks:
            given = _marks(model.infer(np.stack(pictures)))
            audits = {name: _marks(auditor.infer(np.stack(pictures))) for name, auditor in auditors.items()}
            return {**given, **{f"audit_{name}": marks["score"] for name, marks in audits.items()}}

        yield rate


def _marks(given: Any) -> Marks:
    return given if isinstance(given, dict) else {"score": given}


def _locally(scorer: LocalScorer, pictures: Sequence[Picture]) -> npt.NDArray[np.float64]:
    scores = []
    for picture in pictures:
        np.copyto(scorer.buffer, picture)
        scores.append(scorer.score())
    return np.array(scores)


_Edited = tuple[EditedEpisode, EditedEpisode, EditedEpisode | None]  # learned, random, of the intact photo


def _case(learned: EditedEpisode, random: EditedEpisode, rate: Judge, perceptual: Perceptual | None) -> Case:
    shown = (learned.damaged, random.edited, learned.edited, learned.undamaged)
    pictures = dict(zip(KINDS, shown, strict=True))
    recipes: dict[str, Mapping[str, float]] = {"no edits": {}, "random edits": random.edits, "learned": learned.edits}
    given = rate(list(pictures.values()))
    marks = {kind: {name: float(values[i]) for name, values in given.items()} for i, kind in enumerate(pictures)}
    audit: dict[str, dict[str, float]] = {}
    for kind, scores in marks.items():
        jurors = [name for name in scores if name.startswith("audit_")]
        audit[kind] = {name.removeprefix("audit_"): scores.pop(name) for name in jurors}
        if kind in recipes:
            reference = registered(learned.undamaged, learned.degradation["tilt"], recipes[kind])
            audit[kind] |= measure(pictures[kind], reference, perceptual)
    return Case(learned.photo, learned.seed, pictures, marks, audit, learned.degradation, learned.edits)


def _intact(whole: EditedEpisode, perceptual: Perceptual | None) -> Intact:
    reference = registered(whole.damaged, 0.0, whole.edits)
    audit = measure(whole.edited, reference, perceptual)
    return Intact(whole.photo, whole.seed, whole.damaged, whole.edited, whole.before, whole.after, audit)


def _unless(stopped: threading.Event, policy: Policy) -> Policy:
    def act(observation: Observation) -> Action:
        if stopped.is_set():
            raise KeyboardInterrupt
        return policy(observation)

    return act
