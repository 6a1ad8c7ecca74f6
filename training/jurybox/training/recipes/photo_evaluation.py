"""Evaluation of a photo policy: the same degraded photos unedited, edited at random, and edited by the policy."""

from __future__ import annotations

import csv
import io
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.utils import seeding

from jurybox.client import connect
from jurybox.training import interrupts
from jurybox.training.checkpoints import write_atomically
from jurybox.training.environments.photo import (
    Outcome,
    Photo,
    PhotoConfig,
    PhotoEdit,
    RandomEdits,
    evaluate,
)
from jurybox.training.environments.photo.audit import Perceptual, measure, registered
from jurybox.training.environments.photo.edits import Degradation, degrade
from jurybox.training.environments.photo.environment import Action
from jurybox.training.environments.photo.evaluate import Policy
from jurybox.training.environments.photo.observation import Observation
from jurybox.training.environments.photo.scorer import LocalScorer
from jurybox.training.recipes.photo_worker import environment_maker
from jurybox.training.recipes.progress import Watcher

Picture = npt.NDArray[np.uint8]
Marks = Mapping[str, npt.NDArray[np.float64]]
Judge = Callable[[Sequence[Picture]], Marks]

# What becomes of a damaged photo, in the order in which it is shown; the original is the reference.
KINDS = ("no edits", "random edits", "learned", "original")
_FIRST_SEED = 1_000_000  # far from what environments are seeded with
_THREADS = 8  # each holds one picture in flight, so the server has batches to make


@dataclass(frozen=True, slots=True)
class Case:
    """One damaged photo.

    Attributes:
        photo, seed: what it is of, and what crop and damage were drawn from.
        pictures: uint8 (384, 384, 3), by kind.
        marks: every output of the juror, by kind and name; "score" is what was trained on.
        audit: by kind and name, what no juror of the training scored: how far it is from the undamaged photo, and what
            the audit jurors say. The original has the latter alone.
        degradation: what had been done to it. edits: the learned policy's recipe.
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
    """What the learned policy did to an undamaged photo.

    Attributes:
        picture, edited: before and after.
        before, after: scores.
        audit: how far the edited picture is from the photo.
    """

    photo: str
    seed: int
    picture: Picture
    edited: Picture
    before: float
    after: float
    audit: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PhotoEvaluation:
    """All cases of an evaluation, photo by photo for every seed, and the intact photos."""

    cases: tuple[Case, ...]
    intact: tuple[Intact, ...] = ()

    def scores(self, kind: str, criterion: str = "score") -> npt.NDArray[np.float64]:
        """(cases,) of one kind."""
        return np.array([case.marks[kind][criterion] for case in self.cases])

    def audited(self, kind: str, name: str) -> npt.NDArray[np.float64]:
        """(cases,) of one kind: what was not rewarded."""
        return np.array([case.audit[kind][name] for case in self.cases])

    @property
    def photos(self) -> list[str]:
        """The photo of every case."""
        return [case.photo for case in self.cases]

    @property
    def criteria(self) -> tuple[str, ...]:
        """The juror's outputs beside the score."""
        return tuple(name for name in self.cases[0].marks["learned"] if name != "score")

    def save(self, path: Path) -> None:
        """Write a CSV with one line for each case, kind and criterion."""
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(("photo", "seed", "kind", "criterion", "mark"))
        for case in self.cases:
            for kind, marks in case.marks.items():
                told = {**marks, **{f"audit_{name}": mark for name, mark in case.audit.get(kind, {}).items()}}
                writer.writerows((case.photo, case.seed, kind, name, f"{mark:.5f}") for name, mark in told.items())
        for each in self.intact:
            told = {"score": each.after, **{f"audit_{name}": mark for name, mark in each.audit.items()}}
            writer.writerow((each.photo, each.seed, "intact", "score", f"{each.before:.5f}"))
            writer.writerows((each.photo, each.seed, "intact, learned", name, f"{m:.5f}") for name, m in told.items())
        write_atomically(path, text.getvalue())


def evaluate_policy(
    config: PhotoConfig,
    policy: Policy,
    damages: int,
    watcher: Watcher,
    *,
    threads: int = _THREADS,
    perceptual: Perceptual | None = None,
) -> PhotoEvaluation:
    """Evaluate the learned and a random policy on all held-out photos, degraded in `damages` ways, and audit them.

    Of every second seed the learned policy is given the undamaged photos, too.

    Args:
        config: of the training; its held-out photos are used.
        policy: the learned one; called from several threads.
        damages: how many seeds of degradation, the same ones for every policy.
        threads: pictures in flight at once. A local juror is used by one thread only.
        perceptual: a learned distance of two pictures, for the audit.

    Raises:
        ValueError: less than one seed.
        KeyboardInterrupt: the evaluation was interrupted.
    """
    if damages < 1:
        raise ValueError(f"expected at least one seed of degradation, got {damages}")
    held_out = config.held_out()
    seeds = [_FIRST_SEED + number for number in range(damages)]
    threads = 1 if config.scorer == "local" else min(threads, damages)
    stopped = threading.Event()
    edited: list[int] = []
    watcher.begin("evaluating", damages)

    def share(number: int) -> list[_Edited]:
        environment = environment_maker(replace(held_out, audit={}), number, timeout=0.0)()
        if number == 0 and environment.library.left_out:
            watcher.say(environment.library.left_out)
        try:
            found: list[_Edited] = []
            for seed in seeds[number::threads]:
                mend = _unless(stopped, policy)
                learned = evaluate(environment, mend, [seed]).outcomes
                random = evaluate(environment, _unless(stopped, RandomEdits(seed)), [seed]).outcomes
                whole: Sequence[Outcome | None] = [None] * len(learned)
                if seed % 2 == 0:
                    whole = evaluate(environment, mend, [seed], intact=True).outcomes
                found += [
                    (*each, _undamaged(environment, each[0])) for each in zip(learned, random, whole, strict=True)
                ]
                edited.append(seed)
            return found
        finally:
            environment.close()

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(share, number) for number in range(threads)]
        try:
            waiting = set(futures)
            while waiting:
                interrupts.check()
                finished, waiting = wait(waiting, timeout=0.2)
                watcher.advance(len(edited))
                for future in finished:
                    future.result()
            results = [result for future in futures for result in future.result()]
        finally:
            stopped.set()  # on the way out of an error, the others need not go to the end
            watcher.end()
    results.sort(key=lambda result: (result[0].seed, result[0].photo))
    with judge(config) as ask:
        return PhotoEvaluation(
            tuple(_case(learned, random, original, ask, perceptual) for learned, random, _, original in results),
            tuple(_intact(whole, perceptual) for _, _, whole, _ in results if whole is not None),
        )


@contextmanager
def judge(config: PhotoConfig) -> Iterator[Judge]:
    """A function that returns all outputs of the juror for pictures, and scores of audit jurors as ``audit_NAME``; use
    it in a ``with``."""
    if config.scorer == "local":
        scorers = {"score": LocalScorer(config.juror, threads=1)}
        scorers |= {f"audit_{name}": LocalScorer(factory, threads=1) for name, factory in config.audit.items()}
        yield lambda pictures: {name: _locally(scorer, pictures) for name, scorer in scorers.items()}
        return
    with connect(config.address, timeout=config.timeout) as server:
        model = server.model(config.model, rows=len(KINDS))
        auditors = {name: server.model(config.audit_models.get(name, name), rows=len(KINDS)) for name in config.audit}

        def ask(pictures: Sequence[Picture]) -> Marks:
            given = _marks(model.infer(np.stack(pictures)))
            audits = {name: _marks(auditor.infer(np.stack(pictures))) for name, auditor in auditors.items()}
            return {**given, **{f"audit_{name}": marks["score"] for name, marks in audits.items()}}

        yield ask


def _marks(given: Any) -> Marks:
    return given if isinstance(given, dict) else {"score": given}


def _locally(scorer: LocalScorer, pictures: Sequence[Picture]) -> npt.NDArray[np.float64]:
    scores = []
    for picture in pictures:
        np.copyto(scorer.buffer, picture)
        scores.append(scorer.score())
    return np.array(scores)


_Edited = tuple[Outcome, Outcome, Outcome | None, Picture]  # learned, random, of the intact photo, the photo


def _case(
    learned: Outcome,
    random: Outcome,
    original: Picture,
    ask: Judge,
    perceptual: Perceptual | None,
) -> Case:
    pictures = dict(zip(KINDS, (learned.damaged, random.edited, learned.edited, original), strict=True))
    recipes: dict[str, Mapping[str, float]] = {"no edits": {}, "random edits": random.edits, "learned": learned.edits}
    given = ask(list(pictures.values()))
    marks = {kind: {name: float(values[i]) for name, values in given.items()} for i, kind in enumerate(pictures)}
    audit: dict[str, dict[str, float]] = {}
    for kind, told in marks.items():
        jurors = [name for name in told if name.startswith("audit_")]
        audit[kind] = {name.removeprefix("audit_"): told.pop(name) for name in jurors}
        if kind in recipes:
            reference = registered(original, learned.degradation["tilt"], recipes[kind])
            audit[kind] |= measure(pictures[kind], reference, perceptual)
    return Case(learned.photo, learned.seed, pictures, marks, audit, learned.degradation, learned.edits)


def _intact(whole: Outcome, perceptual: Perceptual | None) -> Intact:
    reference = registered(whole.damaged, 0.0, whole.edits)
    audit = measure(whole.edited, reference, perceptual)
    return Intact(whole.photo, whole.seed, whole.damaged, whole.edited, whole.before, whole.after, audit)


def _undamaged(environment: PhotoEdit, outcome: Outcome) -> Picture:
    """The photo before its degradation: the crop is drawn again, and compared."""
    photos: dict[str, Photo] = {photo.name: photo for photo in environment.library.of(environment.split)}
    rng, _ = seeding.np_random(outcome.seed)
    rng.integers(len(photos))  # the environment draws a photo even where it is told which
    crop = photos[outcome.photo].crop(rng)
    damage: dict[str, Any] = dict(outcome.degradation)
    if not np.array_equal(degrade(crop, Degradation(**damage)), outcome.damaged):
        raise AssertionError(f"the crop of {outcome.photo} for seed {outcome.seed} is not the one that was damaged")
    return crop


def _unless(stopped: threading.Event, policy: Policy) -> Policy:
    def act(observation: Observation) -> Action:
        if stopped.is_set():
            raise KeyboardInterrupt
        return policy(observation)

    return act
