"""Trains and evaluates the ranked juror: `python -m jurybox.training.recipes.photo_ranking train --photos DIR`.

Nobody marks a picture. What is learned are orders that are known because the pictures were made in that order: a
photograph is above its damaged copy, less damage of one kind is above more, and an edit that a photograph does not
need is a damage, too. Of a policy's exploits (``--exploits``, recipes as JSON) the one that is further from the
photograph is the worse.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from jurybox.training.environments.photo.audit import distance, registered
from jurybox.training.environments.photo.edits import (
    HIGHEST,
    LOWEST,
    TOOLS,
    Degradation,
    Edits,
    Image,
    apply,
    degrade,
    draw,
)
from jurybox.training.environments.photo.environment import PhotoEdit
from jurybox.training.environments.photo.photos import Photo, PhotoLibrary
from jurybox.training.environments.photo.scorer import LocalScorer
from jurybox.training.policies import Policy, choose

LIST = Path(__file__).with_name("photo_ranking.toml")
JUROR = "jurybox.server.jurors.ranking"
CHAIN = 4  # pictures of one order, the best first
HELD_OUT = 0.25
_HELD_OUT_ORDERS = 300
_EPISODES = 60
_SPARSE = 3  # tools that an unneeded edit moves at most
# Damage that no tool and no fault of the environment does.
_OTHERS = ("jpeg", "vignette", "posterise", "resample", "curve", "motion")
Recipe = tuple[dict[str, float], dict[str, float]]  # damage, edits


def gather(root: Path, out: Path) -> list[str]:
    """Copy the photographs of the list out of a folder into which the packages were unpacked; returns what is missing.

    Those of Python packages are taken where these are installed.
    """
    out.mkdir(parents=True, exist_ok=True)
    missing = []
    for each in tomllib.loads(LIST.read_text())["photograph"]:
        if "module" in each:
            spec = importlib.util.find_spec(each["module"])
            source = Path(spec.origin).parent / each["path"] if spec and spec.origin else Path(each["path"])
        else:
            source = root / each["path"]
        if source.is_file():
            shutil.copyfile(source, out / f"{each['name']}{source.suffix}")
        else:
            missing.append(f"{each['package']}: {source}")
    return missing


def photographs(folder: Path) -> PhotoLibrary:
    """Split by what the pictures show; the photos that the demo holds out are held out here, too."""
    found = PhotoLibrary.from_folder(folder, held_out_share=HELD_OUT)
    return PhotoLibrary(found.training, (*found.held_out, *PhotoLibrary.shipped().held_out))


def chain(photo: Image, rng: np.random.Generator, exploits: Sequence[Recipe] = ()) -> tuple[str, list[Image]]:
    """A kind of damage, and `CHAIN` pictures of one photo in their order, the best first."""
    kind = str(rng.choice(("faults", "edits", "other", "exploit") if exploits else ("faults", "edits", "other")))
    if kind == "exploit":
        return kind, _exploit(photo, exploits[int(rng.integers(len(exploits)))])
    # Stronger by half at least, so that the order can be seen.
    strengths = float(rng.uniform(0.5, 1.2)) * np.array([0.15, 0.45, 1.0]) * rng.uniform(0.8, 1.2)
    if kind == "faults":
        seed = int(rng.integers(2**31))
        return kind, [photo, *(degrade(photo, draw(np.random.default_rng(seed), s)) for s in strengths)]
    if kind == "edits":
        limits = np.where(rng.random(len(TOOLS)) < 0.5, LOWEST, HIGHEST) * rng.uniform(0.2, 0.8, len(TOOLS))
        limits[TOOLS.index("crop")] = 0.0  # the middle of a photo is as good a photo
        chosen = rng.permutation(len(TOOLS))[: int(rng.integers(1, _SPARSE + 1))]
        recipe = np.zeros(len(TOOLS))
        recipe[chosen] = limits[chosen]
        if not recipe.any():
            recipe[TOOLS.index("contrast")] = rng.uniform(0.4, 1.6)
        return kind, [photo, *(apply(photo, Edits.from_vector(recipe * s)) for s in strengths)]
    name = str(rng.choice(_OTHERS))
    sign = float(rng.choice((-1.0, 1.0)))
    return name, [photo, *(_otherwise(photo, name, float(s), sign) for s in strengths)]


def _otherwise(photo: Image, name: str, strength: float, sign: float) -> Image:
    side = photo.shape[0]
    if name == "jpeg":
        quality = int(np.clip(40 - 35 * strength, 3, 60))
        data = cv2.imencode(".jpg", photo, [cv2.IMWRITE_JPEG_QUALITY, quality])[1]
        return np.asarray(cv2.imdecode(data, cv2.IMREAD_COLOR), np.uint8)
    if name == "vignette":
        across = np.linspace(-1, 1, side, dtype=np.float32)
        falls = 1.0 - 0.7 * min(1.0, strength) * (across[:, None] ** 2 + across**2) / 2
        return np.asarray(photo * falls[..., None], np.uint8)
    if name == "posterise":
        step = max(2, round(60 * strength))
        return np.asarray(np.clip(photo // step * step + step // 2, 0, 255), np.uint8)
    if name == "resample":
        small = max(24, round(side / (1 + 5 * strength)))
        shrunk = cv2.resize(photo, (small, small), interpolation=cv2.INTER_AREA)
        return np.asarray(cv2.resize(shrunk, (side, side), interpolation=cv2.INTER_CUBIC), np.uint8)
    if name == "motion":
        kernel = np.full((1, max(3, round(16 * strength))), 1.0, np.float32)
        return np.asarray(cv2.filter2D(photo, -1, kernel / kernel.size), np.uint8)
    levels = np.arange(256) / 255.0
    bent = levels ** (2.0 ** (sign * 1.5 * strength))
    return np.asarray(cv2.LUT(photo, np.rint(255 * bent).astype(np.uint8)), np.uint8)


def _exploit(photo: Image, recipe: Recipe) -> list[Image]:
    """The photo, and its damaged and edited copies by their distance from it; half an edit lies in between."""
    damage, edits = Degradation(**recipe[0]), Edits(**recipe[1])  # type: ignore[arg-type]
    half = Edits.from_vector(edits.vector() / 2)
    damaged = degrade(photo, damage)
    told = []
    for each in (Edits(), half, edits):
        picture = apply(damaged, each)
        reference = registered(photo, damage.tilt, each.as_dict())
        told.append((distance(picture[::4, ::4], reference[::4, ::4]), picture))
    told.sort(key=lambda pair: pair[0])
    return [photo, *(picture for _, picture in told)]


def _drawn(
    photos: Sequence[Photo], rng: np.random.Generator, exploits: Sequence[Recipe], n: int
) -> tuple[list[str], npt.NDArray[np.uint8]]:
    made = [chain(photos[int(rng.integers(len(photos)))].crop(rng), rng, exploits) for _ in range(n)]
    return [kind for kind, _ in made], np.stack([picture for _, pictures in made for picture in pictures])


def loss_of(ranks: torch.Tensor) -> torch.Tensor:
    """Bradley and Terry's, of all pairs of each order; ranks float32 (orders, CHAIN), the best first.

    Across photos the untouched are above the most damaged: that makes the ranks of different photos comparable.
    """
    above, below = torch.triu_indices(CHAIN, CHAIN, 1)
    within = F.softplus(-(ranks[:, above] - ranks[:, below])).mean()
    across = F.softplus(-(ranks[:, :1] - ranks[:, -1].unsqueeze(0))).mean()
    return within + 0.3 * across + 1e-3 * ranks.square().mean()


def described(
    photos: Sequence[Photo], rng: np.random.Generator, orders: int, exploits: Sequence[Recipe] = ()
) -> tuple[list[str], torch.Tensor]:
    """Kinds, and the statistics of as many orders: float32 (orders, CHAIN, statistics)."""
    statistics = _ranked("statistics")
    kinds, rows = list[str](), []
    with torch.inference_mode():
        for number in range(orders):
            drawn, pictures = _drawn(photos, rng, exploits, 1)
            kinds += drawn
            rows.append(statistics(torch.from_numpy(pictures)))
            if (number + 1) % 250 == 0:
                _say(f"{number + 1} orders")
    return kinds, torch.stack(rows).clone()


def train(described_orders: torch.Tensor, *, epochs: int, seed: int) -> Any:
    """Train a ranker on statistics (orders, CHAIN, statistics); returns the module."""
    torch.manual_seed(seed)
    module = _ranked("ranked")(trained=False).module
    flat = described_orders.flatten(0, 1)
    module.mean.copy_(flat.mean(0))
    module.deviation.copy_(flat.std(0) + 1e-3)
    optimiser = torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.03)
    module.train()
    for epoch in range(epochs):
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * max(0.02, 1.0 - epoch / epochs)
        for rows in torch.split(torch.randperm(len(described_orders)), 64):
            ranks = module.rank(described_orders[rows].flatten(0, 1)).reshape(-1, CHAIN)
            optimiser.zero_grad()
            torch.autograd.backward(loss_of(ranks))
            optimiser.step()
    return module.eval()


def accuracy(module: Any, kinds: Sequence[str], orders: torch.Tensor) -> dict[str, tuple[float, float, int]]:
    """By kind of damage: the share of pairs in their order, that of pairs with the photo itself, how many orders."""
    above, below = torch.triu_indices(CHAIN, CHAIN, 1)
    with torch.inference_mode():
        ranks = module.rank(orders.flatten(0, 1)).reshape(-1, CHAIN)
    right = (ranks[:, above] > ranks[:, below]).float()
    found = {}
    for kind in ("all", *sorted(set(kinds))):
        chosen = torch.tensor([kind in ("all", each) for each in kinds])
        found[kind] = (float(right[chosen].mean()), float(right[chosen][:, above == 0].mean()), int(chosen.sum()))
    return found


def read_exploits(file: Path | None) -> list[Recipe]:
    """Recipes as JSON: a list of ``{"degradation": {...}, "edits": {...}}``."""
    if file is None:
        return []
    return [(each["degradation"], each["edits"]) for each in json.loads(file.read_text())]


def find_exploits(run: Path, folder: Path, *, episodes: int, seed: int) -> list[dict[str, Any]]:
    """What a policy does to training photos, every second one intact, where score and distance part, the worst first.

    Args:
        run: folder of a photo training. episodes: how many to play.

    Returns:
        A dict for each exploit: ``degradation`` and ``edits``, ``gain`` of the score, ``away`` in units of CIELAB.
    """
    policy = Policy(choose(run))
    found: list[dict[str, Any]] = []
    rng = np.random.default_rng(seed)
    with policy.environment({"split": "training", "photos": str(folder)}) as made:
        environment: Any = made
        for number in range(episodes):
            photo = str(rng.choice(environment.photos))
            options = {"photo": photo, "intact": number % 2 == 1}
            seen, info = environment.reset(seed=int(rng.integers(2**31)), options=options)
            over = False
            while not over:
                seen, _, over, _, info = environment.step(policy(seen[None])[0])
            gain = info["score"] - info["score_before"]
            away = environment.nearer() * -1.0
            if gain > 0 and away > 0:
                told = {"degradation": info["degradation"], "edits": info["edits"], "gain": gain, "away": away}
                found.append(told)
    return sorted(found, key=lambda each: -each["away"])


def paid_for(juror: str, photos: Sequence[Photo], exploits: Sequence[Recipe], *, price: float, seed: int = 2) -> float:
    """What a juror's score, less the price, gives on average for exploits, each on one of the photos."""
    scorer, rng, gains = LocalScorer(juror, threads=1), np.random.default_rng(seed), list[float]()
    for degradation, edits in exploits:
        given = Degradation(**degradation), Edits(**edits)  # type: ignore[arg-type]
        environment = PhotoEdit(scorer, library=PhotoLibrary(tuple(photos), tuple(photos)), price=price)
        damaged = degrade(photos[int(rng.integers(len(photos)))].crop(rng), given[0])
        gains.append(environment.worth(damaged, given[1]) - environment.worth(damaged, Edits()))
    return float(np.mean(gains))


def _ranked(name: str) -> Any:
    # A training imports nothing of the server; it asks for a juror's factory by name, as a configuration does.
    return getattr(importlib.import_module(JUROR), name)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(given: Sequence[str] | None = None) -> None:
    """`gather`, `train` or `evaluate` a juror, look for `exploits` of a policy, or ask what is `paid` for them."""
    parser = argparse.ArgumentParser(prog="photo_ranking", description=__doc__)
    parser.add_argument("what", choices=("gather", "train", "evaluate", "exploits", "paid"))
    parser.add_argument("--photos", type=Path, required=True, help="folder of photographs")
    parser.add_argument("--root", type=Path, default=Path("/"), help="gather: where the packages are unpacked")
    parser.add_argument("--out", type=Path, help="train, exploits: the file to write")
    parser.add_argument("--weights", type=Path, help="evaluate these; without it those that ship")
    parser.add_argument("--exploits", type=Path, help="recipes that a policy found, as JSON")
    parser.add_argument("--orders", type=int, default=3000, help="train: orders of four pictures")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--run", type=Path, help="exploits: folder of a photo training")
    parser.add_argument("--juror", default="jurybox.server.jurors:jury", help="paid: a factory")
    parser.add_argument("--price", type=float, default=0.0, help="paid: of a unit of CIELAB")
    parser.add_argument("--seed", type=int, default=0)
    said = parser.parse_args(given)
    if said.what == "gather":
        _say("\n".join(gather(said.root, said.photos)) or "all photographs are there")
        return
    if said.what == "exploits":
        worst = find_exploits(said.run, said.photos, episodes=_EPISODES, seed=said.seed)
        said.out.write_text(json.dumps(worst, indent=1))
        away, gain = (np.mean([each[name] for each in worst]) if worst else 0.0 for name in ("away", "gain"))
        _say(f"{len(worst)} of {_EPISODES} episodes: {away:.2f} away on average, for {gain:+.4f} of score")
        return
    from safetensors.torch import load_file, save_file

    library, exploits = photographs(said.photos), read_exploits(said.exploits)
    _say(f"{len(library.training)} photographs to train on, {len(library.held_out)} held out")
    if said.what == "paid":
        _say(f"{paid_for(said.juror, library.held_out, exploits, price=said.price):+.4f} for each on average")
        return
    rng = np.random.default_rng(said.seed)
    if said.what == "train":
        kinds, orders = described(library.training, rng, said.orders, exploits)
        module = train(orders, epochs=said.epochs, seed=said.seed)
        save_file({name: tensor.contiguous() for name, tensor in module.state_dict().items()}, said.out)
        _told("training", accuracy(module, kinds, orders))
    else:
        module = _ranked("ranked")(trained=said.weights is None).module
        if said.weights is not None:
            module.load_state_dict(load_file(said.weights))
    kinds, orders = described(library.held_out, np.random.default_rng(said.seed + 1), _HELD_OUT_ORDERS, exploits)
    _told("held out", accuracy(module, kinds, orders))


def _told(side: str, found: dict[str, tuple[float, float, int]]) -> None:
    for kind, (pairs, first, orders) in found.items():
        _say(f"{side}, {kind}: {pairs:.3f} of the pairs, {first:.3f} of those with the photo, {orders} orders")


if __name__ == "__main__":
    main()
