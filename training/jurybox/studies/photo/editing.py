"""`jurybox edit`: edits pictures at full resolution with a photo policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from jurybox.studies.photo.environment import PhotoConfig, PhotoError, Scorer, observation
from jurybox.studies.photo.environment.edits import TOOLS, Edits, apply, apply_full
from jurybox.studies.photo.environment.photo_edit import STEP_SIZES, make_scorer
from jurybox.studies.photo.environment.photos import SIDE, SUFFIXES, Photo, decoded
from jurybox.training import interrupts
from jurybox.training.checkpoints import write_atomically, write_table
from jurybox.training.policies import Policy, PolicyError

SHEET = "contact-sheet.jpg"
RECIPES = "edits.csv"
_QUALITY = 95
_CELL, _MARGIN, _LINE = 360, 16, 26  # pixels of the contact sheet
_SHEET_ROWS = 40

Image = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Edited:
    """An edited picture.

    Attributes:
        source, target: paths of the original and the edited file.
        edits: the edits that were applied.
        before, after: the juror's scores of the picture's centre square.
    """

    source: Path
    target: Path
    edits: Edits
    before: float
    after: float


def pictures(given: Sequence[Path]) -> list[Path]:
    """Return the given files and the pictures in the given folders.

    Raises:
        PhotoError: there are none, or a file has another suffix than a picture's.
    """
    found: list[Path] = []
    for path in given:
        inside = sorted(each for each in path.iterdir() if each.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
        found += inside
    if not found:
        raise PhotoError(f"no picture in {', '.join(map(str, given))}: expected {', '.join(SUFFIXES)}")
    for path in found:
        if path.suffix.lower() not in SUFFIXES:
            raise PhotoError(f"{path}: expected a picture, {', '.join(SUFFIXES)}")
    return found


def config_of(policy: Policy, changes: Mapping[str, Any]) -> PhotoConfig:
    """Return the settings of the environment that a photo policy was trained in; `changes` override them.

    Raises:
        PolicyError: the policy is not a photo policy, a name is unknown, or an untrusted file names code that is not
            Jurybox's.
    """
    if policy.found.description.training != "photo":
        raise PolicyError(
            f"{policy.found.where} is a policy of {policy.found.description.training}: expected one of photo"
        )
    arguments, known = policy.environment_arguments(changes), PhotoConfig.__dataclass_fields__
    if unknown := arguments.keys() - known:
        raise PolicyError(f"{min(unknown)!r} is no argument of the photo environment: expected some of {sorted(known)}")
    return PhotoConfig(**arguments)


def edit_pictures(
    files: Sequence[Path],
    policy: Policy,
    out: Path,
    config: PhotoConfig,
    on_edited: Callable[[Edited], None] = lambda edited: None,
    failed: Callable[[str], None] = lambda why: None,
) -> list[Edited]:
    """Write an edited copy of each picture to `out` under the same name, with edits.csv and a contact sheet.

    The policy sees the same as in training: the centre square at 384 pixels and the juror's score of it. Its edits are
    then applied to the whole picture. No picture is overwritten: if a name is taken, the new file gets a number.

    Args:
        config: settings of the environment (see `config_of`): the juror and the number of edit steps.
        on_edited: called with each edited picture.
        failed: called with the error of each file that cannot be read; such files are skipped.

    Raises:
        PhotoError: no picture could be read.
    """
    out.mkdir(parents=True, exist_ok=True)
    scorer = make_scorer(config)
    done: list[Edited] = []
    thumbnails: list[tuple[Image, Image]] = []
    try:
        for file in files:
            interrupts.check()
            try:
                whole = decoded(file, file)
            except PhotoError as error:
                failed(str(error))
                continue
            edits, before, after = _recipe(Photo(file.name, whole).centre(), policy, scorer, config)
            edited = apply_full(whole, edits, SIDE)
            target = _free(out, file.name)
            _write(target, edited)
            done.append(Edited(file, target, edits, before, after))
            if len(thumbnails) < _SHEET_ROWS:
                thumbnails.append((_thumbnail(whole), _thumbnail(edited)))
            on_edited(done[-1])
    finally:
        scorer.close()
    if not done:
        raise PhotoError(f"none of {len(files)} pictures could be read")
    _write(out / SHEET, _sheet(done, thumbnails))
    rows = []
    for each in done:
        settings = (f"{value:.4f}" for value in each.edits.vector())
        rows.append((each.source, each.target.name, f"{each.before:.5f}", f"{each.after:.5f}", *settings))
    write_table(out / RECIPES, ("source", "edited", "score_before", "score_after", *TOOLS), rows)
    return done


def _recipe(square: Image, policy: Policy, scorer: Scorer, config: PhotoConfig) -> tuple[Edits, float, float]:
    """Return the policy's edits of a square picture, and the scores before and after."""
    edits, scores = Edits(), list[float]()
    span = config.highest_score - config.lowest_score
    for taken in range(config.steps + 1):
        apply(square, edits, out=scorer.buffer)
        scores.append(scorer.score())
        if taken == config.steps:
            break
        level = 2.0 * (scores[-1] - config.lowest_score) / span - 1.0
        seen = observation.observe(scorer.buffer, edits, taken / config.steps, level)
        edits = edits.moved(np.clip(policy(seen[None])[0].astype(np.float64), -1.0, 1.0) * STEP_SIZES)
    return edits, scores[0], scores[-1]


def _write(file: Path, picture: Image) -> None:
    options = [cv2.IMWRITE_JPEG_QUALITY, _QUALITY] if file.suffix.lower() in (".jpg", ".jpeg") else []
    encoded, data = cv2.imencode(file.suffix.lower(), cv2.cvtColor(picture, cv2.COLOR_RGB2BGR), options)
    if not encoded:
        raise PhotoError(f"{file}: OpenCV cannot write pictures of this kind")
    write_atomically(file, data.tobytes())


def _free(out: Path, name: str) -> Path:
    """Return an unused path in `out`."""
    number, target = 1, out / name
    stem, suffix = target.stem, target.suffix
    while target.exists():
        number += 1
        target = out / f"{stem}-{number}{suffix}"
    return target


def _thumbnail(picture: Image) -> Image:
    height, width = picture.shape[:2]
    scale = _CELL / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(cv2.resize(picture, size, interpolation=cv2.INTER_AREA), np.uint8)


def _sheet(done: Sequence[Edited], thumbnails: Sequence[tuple[Image, Image]]) -> Image:
    """Return the contact sheet: a row for each picture, before and after side by side, with the juror's scores."""
    heights = [max(each.shape[0] for each in pair) + _LINE + _MARGIN for pair in thumbnails]
    sheet: Image = np.full((sum(heights) + _MARGIN, 2 * _CELL + 3 * _MARGIN, 3), 245, np.uint8)
    top = _MARGIN
    for each, pair, height in zip(done, thumbnails, heights, strict=False):
        for column, (picture, score) in enumerate(zip(pair, (each.before, each.after), strict=True)):
            left = _MARGIN + column * (_CELL + _MARGIN)
            sheet[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
            text = f"{each.target.name[:28]}  {score:.3f}".encode("ascii", "replace").decode()
            place = (left, top + height - _MARGIN - 8)
            cv2.putText(sheet, text, place, cv2.FONT_HERSHEY_SIMPLEX, 0.5, (30, 30, 30), 1, cv2.LINE_AA)
        top += height
    return sheet
