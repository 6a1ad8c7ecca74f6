"""`python -m benchmarks.photo_damages [--run RUN | --start FILE | --juror | --greys] [--photos DIR]`: damage by damage.

The policy that ships, a start policy or that of a run edits held-out photographs with one fault at a time, the same
crops for every fault. Nothing but the crops is random, so two policies are compared picture by picture.
results/photo.md has the tables. With --photos the held-out quarter of a folder is edited instead of the photographs
that ship. With --juror no policy edits: it prints what the juror gives for mending each cast wholly. With --greys
estimates of the light's colour that learn one factor only mend the casts: what a picture tells of its cast without a
network.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

from benchmarks.photo_ranking import photographs
from jurybox.studies.photo.environment import PhotoConfig, PhotoEdit, PhotoLibrary, ServerScorer, observation
from jurybox.studies.photo.environment.audit import distance, measure, registered
from jurybox.studies.photo.environment.edits import LINEAR, TOOLS, Edits, Image, apply
from jurybox.studies.photo.environment.photo_edit import make_scorer
from jurybox.studies.photo.learning import PhotoTraining, parts
from jurybox.studies.photo.network import PhotoMoves
from jurybox.studies.photo.start import SHIPPED
from jurybox.studies.photo.train import DEMO_ENVIRONMENT
from jurybox.training.policies import Policy, choose

Act = Callable[[npt.NDArray[np.float32]], npt.NDArray[Any]]
# By the name of a row: settings of a Degradation.
DAMAGES: Mapping[str, Mapping[str, float]] = {
    "none (intact)": {},
    "warm cast, 0.4 stops": {"temperature": 0.4},
    "warm cast, 0.8": {"temperature": 0.8},
    "warm cast, 1.2": {"temperature": 1.2},
    "cold cast, 0.4": {"temperature": -0.4},
    "cold cast, 0.8": {"temperature": -0.8},
    "cold cast, 1.2": {"temperature": -1.2},
    "magenta cast, 0.3": {"tint": 0.3},
    "green cast, 0.3": {"tint": -0.3},
    "dark, 1 stop": {"exposure": -1.0},
    "dark, 1.8": {"exposure": -1.8},
    "dark, 2.6": {"exposure": -2.6},
    "bright, 1.1": {"exposure": 1.1},
    "haze, 0.55": {"haze": 0.55},
    "pale, 1.6": {"saturation": -1.6},
    "gaudy, 0.8": {"saturation": 0.8},
    "warm 0.8 and dark 1.8": {"temperature": 0.8, "exposure": -1.8},
    "tilt, 4°": {"tilt": 4.0},
    "tilt, -4°": {"tilt": -4.0},
}
CASTS = {name: damage for name, damage in DAMAGES.items() if damage and not damage.keys() - {"temperature", "tint"}}
# By name: the exponent of the mean of linear light, or of that of its edges, that is grey on average. Grey world:
# Buchsbaum, "A spatial processor model for object colour perception", 1980; shades of grey: Finlayson and Trezzi, 2004;
# grey edge: van de Weijer et al., "Edge-based color constancy", 2007.
GREYS: Mapping[str, tuple[float, bool]] = {
    "grey world": (1.0, False), "shades of grey": (6.0, False), "grey edge": (1.0, True), "grey edge, 6": (6.0, True),
}  # fmt: skip
_FACTORS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_SMALL = 96
HEAD = (
    "| damage | PSNR better | PSNR, dB | CIEDE2000 lower | CIEDE2000 | turned, degrees | turned by more than 2° |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)
JUROR_HEAD = (
    "| damage | score, photo | score, damaged | photo above | mended pays | its gain after the price |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: |"
)


def start_policy(file: Path) -> Act:
    """The policy of a file that `jurybox.studies.photo.start` wrote."""
    own = "mlp_extractor.policy_net."
    state = {name.removeprefix(own): each for name, each in load_file(file).items() if name.startswith(own)}
    module = PhotoMoves(observation.SIZE, len(TOOLS), PhotoTraining().hidden, **parts())
    module.load_state_dict(state)

    def act(seen: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        with torch.no_grad():
            moves: npt.NDArray[Any] = module(torch.from_numpy(seen[None]))[0].numpy()
        return moves

    return act


def run_policy(run: Path) -> Act:
    """The policy of a run's newest checkpoint."""
    policy = Policy(choose(run))

    def act(seen: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        moves: npt.NDArray[Any] = policy(seen[None])[0]
        return moves

    return act


def edited(environment: PhotoEdit, act: Act, crops: int, damage: Mapping[str, float]) -> list[tuple[float, ...]]:
    """Edit every photo in some crops; return PSNR and CIEDE2000 before and after, and the degrees turned, of each."""
    found = []
    for crop in range(crops):
        for number, photo in enumerate(environment.photos):
            seed = 4_000_000 + 1000 * number + crop
            seen, _ = environment.reset(seed=seed, options={"photo": photo, "degradation": damage})
            before = measure(environment.picture(), registered(environment.undamaged(), damage.get("tilt", 0.0), {}))
            over = False
            while not over:
                seen, _, over, _, info = environment.step(np.clip(act(seen), -1.0, 1.0))
            reference = registered(environment.undamaged(), damage.get("tilt", 0.0), info["edits"])
            after = measure(environment.picture(), reference)
            pairs = [marks[name] for name in ("psnr", "ciede2000") for marks in (before, after)]
            found.append((*pairs, info["edits"]["straighten"]))
    return found


def row(name: str, rows: Sequence[tuple[float, ...]], damage: Mapping[str, float]) -> str:
    """A row of the table."""
    psnr, psnr_after, colour, colour_after, turned = np.array(rows).T
    better, lower = (f"{share.mean():.0%}" for share in (psnr_after > psnr, colour_after < colour))
    before_and_after = f"{psnr.mean():.1f} → {psnr_after.mean():.1f}"
    if not damage:
        better, before_and_after, lower = "", f"{psnr_after.mean():.1f}", f"{(colour_after > 3).mean():.0%} above 3"
    cells = [name, better, before_and_after, lower, f"{colour.mean():.1f} → {colour_after.mean():.1f}"]
    cells += [f"{np.abs(turned).mean():.1f}", f"{(np.abs(turned) > 2).mean():.0%}"]
    return f"| {' | '.join(cells)} |".replace("%", " %")


def judged(environment: PhotoEdit, crops: int, damage: Mapping[str, float]) -> npt.NDArray[np.float64]:
    """Score a cast, float64 (pictures, 3): the photo's, the damaged one's, and the gain of the opposite cast.

    The gain is the sum of an episode's rewards, in units of the score: the increase, less the price of that edit.
    """
    mending = Edits(**{name: -value for name, value in damage.items()})
    found = []
    for crop in range(crops):
        for number, photo in enumerate(environment.photos):
            seed = 4_000_000 + 1000 * number + crop
            scores = [
                environment.reset(seed=seed, options={"photo": photo, "degradation": each})[1]["score"]
                for each in ({}, damage)
            ]
            found.append((*scores, environment.worth(environment.picture(), mending) - scores[1]))
    return np.array(found)


def judged_row(name: str, found: npt.NDArray[np.float64]) -> str:
    """A row of the juror's table."""
    photo, damaged, gain = found.T
    cells = [name, f"{photo.mean():.3f}", f"{damaged.mean():.3f}", f"{(photo > damaged).mean():.0%}"]
    return f"| {' | '.join([*cells, f'{(gain > 0).mean():.0%}', f'{gain.mean():+.3f}'])} |".replace("%", " %")


def estimated(picture: Image, exponent: float, edges: bool) -> npt.NDArray[np.float64]:
    """Temperature and tint of a picture's light in stops, float64 (2,), if its light or its edges are grey on average.

    Args:
        picture: uint8 (side, side, 3) RGB.
        exponent: of Minkowski's mean: 1 is the mean; the larger, the more the brightest count.
        edges: whether the steps from pixel to pixel are averaged instead of the pixels.
    """
    small = _shrunk(picture)
    whole, light = small.max(axis=2) < 251, LINEAR[small]
    values = light
    if edges:
        down, right = (np.diff(light, axis=axis, append=light.take([-1], axis)) for axis in (0, 1))
        values = np.hypot(down, right)
    found = values[whole] if whole.any() else values.reshape(-1, 3)
    red, green, blue = np.log2(np.mean((found + 1e-4) ** exponent, axis=0)) / exponent
    return np.array([red - blue, (red + blue) / 2 - green])


@dataclass(frozen=True, slots=True)
class Grey:
    """Mends a cast by a share of what the light of a picture differs from the usual light.

    Attributes:
        exponent, edges: how the light is estimated, see `estimated`.
        usual: temperature and tint of photographs' light.
        factor: the share.
    """

    exponent: float
    edges: bool
    usual: npt.NDArray[np.float64]
    factor: float

    def __call__(self, picture: Image) -> Edits:
        """Return the edits that mend a picture, uint8 (side, side, 3)."""
        return self.edits(estimated(picture, self.exponent, self.edges))

    def edits(self, light: npt.NDArray[np.float64]) -> Edits:
        """Return the edits for an estimate of the light."""
        temperature, tint = -self.factor * (light - self.usual)
        return Edits.from_vector(Edits(temperature=temperature, tint=tint).vector())


def fitted(
    exponent: float, edges: bool, pairs: Sequence[tuple[Image, Image]], weights: Sequence[Sequence[float]]
) -> list[Grey]:
    """Choose the share that leaves the least distance in CIELAB of pairs, for every way to weigh them.

    Args:
        pairs: pictures of training photographs, damaged and undamaged, uint8 (side, side, 3).
        weights: lists of as many numbers: how much each pair counts.
    """
    usual = np.mean([estimated(photo, exponent, edges) for _, photo in pairs], axis=0)
    greys = [Grey(exponent, edges, usual, factor) for factor in _FACTORS]
    left = []
    for pair in pairs:
        damaged, photo = (_shrunk(each) for each in pair)
        light = estimated(damaged, exponent, edges)
        left.append([distance(apply(damaged, grey.edits(light)), photo) for grey in greys])
    return [greys[int(np.argmin(np.average(left, axis=0, weights=each)))] for each in weights]


def _shrunk(picture: Image) -> Image:
    return np.asarray(cv2.resize(picture, (_SMALL, _SMALL), interpolation=cv2.INTER_AREA), np.uint8)


def pictures(environment: PhotoEdit, crops: int, damage: Mapping[str, float]) -> list[tuple[Image, Image]]:
    """Every photo in some crops, damaged and undamaged: those that `edited` begins with."""
    found = []
    for crop in range(crops):
        for number, photo in enumerate(environment.photos):
            seed = 4_000_000 + 1000 * number + crop
            environment.reset(seed=seed, options={"photo": photo, "degradation": damage})
            found.append((environment.picture(), environment.undamaged()))
    return found


def print_greys(training: PhotoEdit, environment: PhotoEdit, crops: int) -> None:
    """Print what estimates of the light mend of casts, with the share that is best for the training photographs."""
    damages: Mapping[str, Mapping[str, float]] = {"none (intact)": {}, **CASTS}
    pairs, casts, mixed = list[tuple[Image, Image]](), list[float](), list[float]()
    for damage in damages.values():
        found = pictures(training, 1, damage)
        pairs += found
        casts += [float(bool(damage))] * len(found)
        mixed += [0.4 / len(CASTS) if damage else 0.6] * len(found)
    both = {name: fitted(*how, pairs, (casts, mixed)) for name, how in GREYS.items()}
    print("Best share for casts, and with 60 % intact photographs beside them: ", end="")
    print(", ".join(f"{name} {alone.factor:.1f}, {beside.factor:.1f}" for name, (alone, beside) in both.items()))
    print(f"\n| damage | CIEDE2000 | {' | '.join(both)} |\n| --- |{' ---: |' * (1 + len(both))}", flush=True)
    for name, damage in damages.items():
        shown = pictures(environment, crops, damage)
        before = np.array([measure(*pair)["ciede2000"] for pair in shown])
        cells = [name, f"{before.mean():.1f}"]
        for grey, _ in both.values():
            after = np.array([measure(apply(seen, grey(seen)), photo)["ciede2000"] for seen, photo in shown])
            share = f"{(after < before).mean():.0%}: " if damage else ""
            cells.append(f"{share}{after.mean():.1f}")
        print(f"| {' | '.join(cells)} |".replace("%", " %"), flush=True)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.photo_damages", description=__doc__)
    parser.add_argument("--run", type=Path, help="folder of a photo training, whose policy is used")
    parser.add_argument("--start", type=Path, default=SHIPPED, help="a file of jurybox.studies.photo.start")
    parser.add_argument("--juror", action="store_true", help="what the juror gives for mending casts, without a policy")
    parser.add_argument("--greys", action="store_true", help="what estimates of the light mend, without a policy")
    parser.add_argument("--photos", type=Path, help="folder of photographs; its held-out quarter is edited")
    parser.add_argument("--crops", type=int, default=2, help="pictures of each photograph and damage")
    given = parser.parse_args()
    torch.set_num_threads(1)
    library = PhotoLibrary.shipped() if given.photos is None else photographs(given.photos)
    scorer = make_scorer(PhotoConfig(scorer="local", juror=str(DEMO_ENVIRONMENT["juror"])))
    assert not isinstance(scorer, ServerScorer)
    price = float(DEMO_ENVIRONMENT["price"])
    environment = PhotoEdit(scorer, library=library, split="held_out", price=price)
    print(f"{len(environment.photos)} photographs, {given.crops} crops of each\n", flush=True)
    if given.greys:
        print_greys(PhotoEdit(scorer, library=library), environment, given.crops)
    elif given.juror:
        print(JUROR_HEAD, flush=True)
        for name, damage in CASTS.items():
            print(judged_row(name, judged(environment, given.crops, damage)), flush=True)
    else:
        print(HEAD, flush=True)
        act = start_policy(given.start) if given.run is None else run_policy(given.run)
        for name, damage in DAMAGES.items():
            print(row(name, edited(environment, act, given.crops, damage), damage), flush=True)
    environment.close()


if __name__ == "__main__":
    main()
