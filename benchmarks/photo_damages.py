"""`python -m benchmarks.photo_damages [--run RUN | --start FILE | --juror] [--photos DIR]`: a policy, damage by damage.

The policy that ships, a start policy or that of a run edits held-out photographs with one fault at a time, the same
crops for every fault. Nothing but the crops is random, so two policies are compared picture by picture.
results/photo.md has the tables. With --photos the held-out quarter of a folder is edited instead of the photographs
that ship. With --juror no policy edits: it prints what the juror gives for mending each cast wholly.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

from benchmarks.photo_ranking import photographs
from jurybox.studies.photo.environment import PhotoConfig, PhotoEdit, PhotoLibrary, ServerScorer, observation
from jurybox.studies.photo.environment.audit import measure, registered
from jurybox.studies.photo.environment.edits import TOOLS, Edits
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


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.photo_damages", description=__doc__)
    parser.add_argument("--run", type=Path, help="folder of a photo training, whose policy is used")
    parser.add_argument("--start", type=Path, default=SHIPPED, help="a file of jurybox.studies.photo.start")
    parser.add_argument("--juror", action="store_true", help="what the juror gives for mending casts, without a policy")
    parser.add_argument("--photos", type=Path, help="folder of photographs; its held-out quarter is edited")
    parser.add_argument("--crops", type=int, default=2, help="pictures of each photograph and damage")
    given = parser.parse_args()
    torch.set_num_threads(1)
    library = PhotoLibrary.shipped() if given.photos is None else photographs(given.photos)
    scorer = make_scorer(PhotoConfig(scorer="local", juror=str(DEMO_ENVIRONMENT["juror"])))
    assert not isinstance(scorer, ServerScorer)
    environment = PhotoEdit(scorer, library=library, split="held_out", price=float(DEMO_ENVIRONMENT["price"]))
    head = JUROR_HEAD if given.juror else HEAD
    print(f"{len(environment.photos)} photographs, {given.crops} crops of each\n\n{head}", flush=True)
    if given.juror:
        for name, damage in DAMAGES.items():
            if damage and not damage.keys() - {"temperature", "tint"}:
                print(judged_row(name, judged(environment, given.crops, damage)), flush=True)
    else:
        act = start_policy(given.start) if given.run is None else run_policy(given.run)
        for name, damage in DAMAGES.items():
            print(row(name, edited(environment, act, given.crops, damage), damage), flush=True)
    environment.close()


if __name__ == "__main__":
    main()
