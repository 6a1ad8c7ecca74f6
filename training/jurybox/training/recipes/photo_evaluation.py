"""Evaluation of a photo policy: the same degraded photos unedited, edited at random, and edited by the policy."""

from __future__ import annotations

import csv
import io
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
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
from jurybox.training.environments.photo.edits import Degradation, degrade
from jurybox.training.environments.photo.scorer import LocalScorer
from jurybox.training.recipes.photo_worker import environment_maker
from jurybox.training.recipes.progress import Watcher

Picture = npt.NDArray[np.uint8]
Vector = npt.NDArray[np.float32]
Policy = Callable[[Vector], Vector]
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
    """

    photo: str
    seed: int
    pictures: Mapping[str, Picture]
    marks: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class PhotoEvaluation:
    """All cases of an evaluation, photo by photo for every seed."""

    cases: tuple[Case, ...]

    def scores(self, kind: str, criterion: str = "score") -> npt.NDArray[np.float64]:
        """(cases,) of one kind."""
        return np.array([case.marks[kind][criterion] for case in self.cases])

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
                writer.writerows((case.photo, case.seed, kind, name, f"{mark:.5f}") for name, mark in marks.items())
        write_atomically(path, text.getvalue())


def evaluate_policy(
    config: PhotoConfig, policy: Policy, damages: int, watcher: Watcher, *, threads: int = _THREADS
) -> PhotoEvaluation:
    """Evaluate the learned and a random policy on all held-out photos, degraded in `damages` ways.

    Args:
        config: of the training; its held-out photos are used.
        policy: the learned one; called from several threads.
        damages: how many seeds of degradation, the same ones for every policy.
        threads: pictures in flight at once. A local juror is used by one thread only.

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

    def share(number: int) -> list[tuple[Outcome, Outcome, Picture]]:
        environment = environment_maker(held_out, number, timeout=0.0)()
        try:
            found = []
            for seed in seeds[number::threads]:
                pairs = zip(
                    evaluate(environment, _unless(stopped, policy), [seed]).outcomes,
                    evaluate(environment, _unless(stopped, RandomEdits(seed)), [seed]).outcomes,
                    strict=True,
                )
                found += [(learned, random, _undamaged(environment, learned)) for learned, random in pairs]
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
        return PhotoEvaluation(tuple(_case(*result, ask) for result in results))


@contextmanager
def judge(config: PhotoConfig) -> Iterator[Judge]:
    """A function that returns all outputs of the juror for pictures; use it in a ``with``."""
    if config.scorer == "local":
        scorer = LocalScorer(config.juror, threads=1)
        yield lambda pictures: _locally(scorer, pictures)
        return
    with connect(config.address, timeout=config.timeout) as server:
        model = server.model(config.model, rows=len(KINDS))

        def ask(pictures: Sequence[Picture]) -> Marks:
            given = model.infer(np.stack(pictures))
            return given if isinstance(given, dict) else {"score": given}

        yield ask


def _locally(scorer: LocalScorer, pictures: Sequence[Picture]) -> Marks:
    scores = []
    for picture in pictures:
        np.copyto(scorer.buffer, picture)
        scores.append(scorer.score())
    return {"score": np.array(scores)}


def _case(learned: Outcome, random: Outcome, original: Picture, ask: Judge) -> Case:
    pictures = dict(zip(KINDS, (learned.damaged, random.edited, learned.edited, original), strict=True))
    marks = ask(list(pictures.values()))
    return Case(
        learned.photo,
        learned.seed,
        pictures,
        {kind: {name: float(values[i]) for name, values in marks.items()} for i, kind in enumerate(pictures)},
    )


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
    def act(observation: Vector) -> Vector:
        if stopped.is_set():
            raise KeyboardInterrupt
        return policy(observation)

    return act
