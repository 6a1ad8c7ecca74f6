"""Train and evaluate the ranked juror: `python -m benchmarks.photo_ranking train --photos DIR`.

No picture is labelled by hand. The juror learns from orders of pictures that are known by construction: a photograph
ranks above its damaged copy, less damage of a kind above more, and an edit that a photograph does not need counts as
damage, too. Among a policy's exploits (``--exploits``, edits as JSON), one that is further from the photograph ranks
lower.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import struct
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from gymnasium.utils import seeding

from jurybox.studies.photo.environment.audit import registered
from jurybox.studies.photo.environment.edits import (
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
from jurybox.studies.photo.environment.photo_edit import STEP_SIZES, PhotoEdit
from jurybox.studies.photo.environment.photos import Photo, PhotoLibrary, read_photo
from jurybox.studies.photo.environment.scorer import LocalScorer, Scorer
from jurybox.training.policies import Policy, choose

LIST = Path(__file__).with_name("photo_ranking.toml")
JUROR = "jurybox.server.jurors.ranking"
CHAIN = 5  # pictures in an order: the photograph, and four at increasing distances from it
HELD_OUT = 0.25
_HELD_OUT_ORDERS = 300
_EPISODES = 400
_CLEAR = 0.1  # pairs whose distances differ by less do not count for the accuracy
_SPARSE = 3  # maximum number of tools that an unneeded edit moves
# Lone casts are shown more often than they occur: little else tells one from a photograph's own colours.
_KINDS, _HOW_OFTEN = ("faults", "cast", "edits", "other", "edited"), (0.12, 0.2, 0.12, 0.08, 0.48)
# Kinds of damage that neither the tools nor the environment's faults produce.
_OTHERS = ("jpeg", "vignette", "posterise", "resample", "curve", "motion")
Recipe = tuple[dict[str, float], dict[str, float]]  # damage, edits


def gather(root: Path, out: Path) -> int:
    """Copy the listed photographs from a folder with the unpacked packages; return their number.

    Photographs of Python packages are copied from the installed packages.

    Raises:
        FileNotFoundError: some are missing, and nothing was copied; the message has their number and names.
    """
    listed = tomllib.loads(LIST.read_text())["photograph"]
    sources = [_source(each, root) for each in listed]
    if missing := [
        f"{each['package']}: {source}" for each, source in zip(listed, sources, strict=True) if not source.is_file()
    ]:
        raise FileNotFoundError(
            f"{len(missing)} of {len(listed)} photographs are missing, so none was copied: unpack their packages into "
            f"{root} (docs/photo.md)\n" + "\n".join(missing)
        )
    out.mkdir(parents=True, exist_ok=True)
    archives = dict[Path, dict[str, bytes]]()
    for each, source in zip(listed, sources, strict=True):
        if "member" in each:
            if source not in archives:
                archives[source] = dict(_members(source.read_bytes()))
            encoded = np.frombuffer(archives[source][each["member"]], np.uint8)
            copy = out / f"{each['name']}.png"
            cv2.imwrite(str(copy), np.asarray(cv2.imdecode(encoded, cv2.IMREAD_COLOR)))
            # At the size in which it is used: these are large, and every worker reads them all.
            cv2.imwrite(str(copy), read_photo(copy).pixels[..., ::-1])
        else:
            shutil.copyfile(source, out / f"{each['name']}{source.suffix}")
    return len(listed)


def _source(each: Mapping[str, str], root: Path) -> Path:
    if "module" not in each:
        return root / each["path"]
    spec = importlib.util.find_spec(each["module"])
    return Path(spec.origin).parent / each["path"] if spec and spec.origin else Path(each["path"])


def _members(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the path and content of every file in a Qt resource archive (.rcc)."""
    version, tree, contents, names = struct.unpack_from(">4x4I", data)
    row = 22 if version >= 2 else 14

    def walk(number: int, path: str) -> Iterator[tuple[str, bytes]]:
        at = tree + number * row
        name, flags, first, second = struct.unpack_from(">IHII", data, at)
        if number:
            length = struct.unpack_from(">H", data, names + name)[0]
            path += "/" + data[names + name + 6 :][: 2 * length].decode("utf-16-be")
        if flags & 2:
            for child in range(second, second + first):
                yield from walk(child, path)
        else:
            begin = contents + second
            yield path[1:], data[begin + 4 :][: struct.unpack_from(">I", data, begin)[0]]

    yield from walk(0, "")


def photographs(folder: Path) -> PhotoLibrary:
    """Load a folder's photographs, split by their content; the demo's held-out photos are held out here, too."""
    found = PhotoLibrary.from_folder(folder, held_out_share=HELD_OUT)
    return PhotoLibrary(found.training, (*found.held_out, *PhotoLibrary.shipped().held_out[:2]))


@dataclass(frozen=True, slots=True)
class Order:
    """`CHAIN` pictures of one photograph, the best first, which is the photograph itself.

    Attributes:
        kind: kind of damage.
        pictures: uint8 (384, 384, 3).
        distances: distances from the registered photograph, computed with `far`.
        tilts: degrees counter-clockwise.
    """

    kind: str
    pictures: tuple[Image, ...]
    distances: tuple[float, ...]
    tilts: tuple[float, ...]


def difference(picture: Image, reference: Image) -> float:
    """Return the distance of two pictures.

    It is the mean of log(1 + CIEDE2000), at 64 pixels, and log(1 + root-mean-square error in percent).
    """
    import skimage.color

    colour: Any = skimage.color  # not annotated
    small = [cv2.resize(each, (64, 64), interpolation=cv2.INTER_AREA) for each in (picture, reference)]
    colours = float(colour.deltaE_ciede2000(*(colour.rgb2lab(each) for each in small)).mean())
    error = float(np.sqrt(np.mean(np.square(cv2.absdiff(picture, reference).astype(np.float32)))))
    return float(0.5 * (np.log1p(colours) + np.log1p(error / 2.55)))


def order(photo: Image, rng: np.random.Generator, exploit: Recipe | None = None) -> Order:
    """Create an order: damage a photo in four ways, and compute each picture's distance from it.

    The kind of damage is drawn: faults of the environment at four strengths, a cast alone at four strengths, unneeded
    edits, other damage, or pictures that a policy may visit, which are damaged copies (one in four undamaged) with
    edits towards the cure or at random.
    With `exploit`, the pictures have that exploit at four strengths.
    """
    kind = str(rng.choice(_KINDS, p=_HOW_OFTEN))
    kind = "exploit" if exploit else kind
    strengths = float(rng.uniform(0.5, 1.2)) * np.array([0.15, 0.4, 0.7, 1.0])
    made: list[tuple[Degradation, Edits]] = []
    if kind == "other":
        name, sign = str(rng.choice(_OTHERS)), float(rng.choice((-1.0, 1.0)))
        pictures = [_apply_other(photo, name, float(s), sign) for s in strengths]
        measured = [(each, difference(each, photo), 0.0) for each in pictures]
        return _ordered(name, photo, measured)
    if kind == "faults":
        seed = int(rng.integers(2**31))
        made = [(draw(np.random.default_rng(seed), float(s)), Edits()) for s in strengths]
    elif kind == "cast":
        warmth, tint = float(rng.uniform(-1.2, 1.2)), float(rng.uniform(-0.4, 0.4))
        made = [(Degradation(temperature=warmth * s, tint=tint * s), Edits()) for s in strengths]
    elif kind == "edits":
        recipe = _few_tools(rng)
        made = [(Degradation(), Edits.from_vector(recipe * s)) for s in strengths]
    elif exploit:
        damage, found = Degradation(**exploit[0]), Edits(**exploit[1]).vector()  # type: ignore[arg-type]
        made = [(damage, Edits.from_vector(found * s)) for s in (0.0, 0.5, 1.0, rng.uniform(0.2, 1.5))]
    else:
        damage = Degradation() if rng.random() < 0.25 else draw(rng, float(rng.choice((0.5, 1.0))))
        made = [(damage, Edits()), *((damage, _draw_edits(damage, rng)) for _ in range(3))]
    measured = []
    for damage, edits in made:
        picture = apply(degrade(photo, damage), edits)
        reference = registered(photo, damage.tilt, edits.as_dict())
        measured.append((picture, difference(picture, reference), damage.tilt + edits.straighten))
    return _ordered(kind, photo, measured)


def _ordered(kind: str, photo: Image, measured: list[tuple[Image, float, float]]) -> Order:
    measured = [(photo, 0.0, 0.0), *sorted(measured, key=lambda each: each[1])]
    pictures, distances, tilts = zip(*measured, strict=True)
    return Order(kind, pictures, distances, tilts)


def _few_tools(rng: np.random.Generator) -> npt.NDArray[np.float64]:
    limits = np.where(rng.random(len(TOOLS)) < 0.5, LOWEST, HIGHEST) * rng.uniform(0.2, 0.8, len(TOOLS))
    limits[TOOLS.index("crop")] = 0.0  # cropping does no damage: the centre of a photo is as good as the whole
    chosen = rng.permutation(len(TOOLS))[: int(rng.integers(1, _SPARSE + 1))]
    recipe = np.zeros(len(TOOLS))
    recipe[chosen] = limits[chosen]
    if not recipe.any():
        recipe[TOOLS.index("contrast")] = rng.uniform(0.4, 1.6)
    return recipe


def _draw_edits(damage: Degradation, rng: np.random.Generator) -> Edits:
    """Draw edits that a policy might make: part of the cure or too much of it, or random steps."""
    n = len(TOOLS)
    if rng.random() < 0.35:
        wide = rng.uniform(0.2, 0.7)
        moves = np.clip(rng.normal(0, wide, (int(rng.integers(1, 5)), n)), -1, 1).sum(axis=0) * STEP_SIZES
        return Edits.from_vector(moves)
    cure = Edits(
        exposure=-damage.exposure - 3 * (damage.veil - 0.5) * damage.haze,
        contrast=-np.log2(1 - damage.haze),
        saturation=-damage.saturation,
        temperature=-damage.temperature,
        tint=-damage.tint,
        sharpness=0.8 * damage.blur,
        denoise=2 * damage.noise,
        straighten=-damage.tilt,
    ).vector()
    share = rng.uniform(0, 1.5) if rng.random() < 0.5 else rng.uniform(0, 1.7, n)
    return Edits.from_vector(cure * share + rng.normal(0, 1, n) * STEP_SIZES * rng.choice((0.0, 0.2, 0.5)))


def _apply_other(photo: Image, name: str, strength: float, sign: float) -> Image:
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


@dataclass(frozen=True, slots=True)
class Exploit:
    """A policy's edits that raised the juror's score while the picture moved away from the undamaged photo.

    Attributes:
        degradation, edits: the damage and the edits, by the field names of `Degradation` and `Edits`.
        gain: increase of the score.
        away: increase of the distance from the undamaged photo, in units of CIELAB.
        photo, seed, intact: the picture that it was found on; with these, an environment creates it again.
    """

    degradation: dict[str, float]
    edits: dict[str, float]
    gain: float
    away: float
    photo: str
    seed: int
    intact: bool

    @property
    def recipe(self) -> Recipe:
        return self.degradation, self.edits


@dataclass(frozen=True, slots=True)
class Described:
    """Orders as training data of the juror.

    Attributes:
        kinds: kind of damage of each order.
        found: statistics of the pictures, float32 (orders, CHAIN, statistics).
        distances, tilts: float32 (orders, CHAIN).
    """

    kinds: tuple[str, ...]
    found: torch.Tensor
    distances: torch.Tensor
    tilts: torch.Tensor


def described(
    photos: Sequence[Photo], numbers: Sequence[int], seed: int, exploits: Sequence[Exploit] = (), *, there: bool = False
) -> Described:
    """Create the orders of these numbers, each from a random photo. The same number and seed give the same order.

    Args:
        exploits: if given, each order is made from a random one of these exploits.
        there: apply an exploit to the picture that it was found on, not to a random photo.
    """
    statistics = _ranked("statistics")
    kinds, rows, distances, tilts = list[str](), [], [], []
    with torch.inference_mode():
        for number in numbers:
            rng = np.random.default_rng((seed, number))
            if exploits:
                exploit = exploits[int(rng.integers(len(exploits)))]
                photo = found_on(photos, exploit) if there else photos[int(rng.integers(len(photos)))].crop(rng)
                made = order(photo, rng, exploit.recipe)
            else:
                made = order(photos[int(rng.integers(len(photos)))].crop(rng), rng)
            kinds.append(made.kind)
            rows.append(statistics(torch.from_numpy(np.stack(made.pictures))))
            distances.append(made.distances)
            tilts.append(made.tilts)
            if (number + 1) % 250 == 0:
                _print(f"{number + 1} orders")
    return Described(tuple(kinds), torch.stack(rows).clone(), torch.tensor(distances), torch.tensor(tilts))


def joined(one: Described, other: Described) -> Described:
    """Return the orders of both, concatenated."""
    tensors = ((one.found, other.found), (one.distances, other.distances), (one.tilts, other.tilts))
    return Described(one.kinds + other.kinds, *(torch.cat(pair) for pair in tensors))


def loss_of(distances: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the loss for predicted and true distances, both float32 (orders, CHAIN), the best first.

    It is the smooth L1 loss of the distances, so that the predictions have the right scale, plus Bradley and Terry's
    loss of all pairs of each order, weighted by the difference of the true distances.
    """
    above, below = torch.triu_indices(CHAIN, CHAIN, 1)
    clear = (wanted[:, below] - wanted[:, above]).clamp(max=0.5)
    pairs = clear * F.softplus(-4 * (distances[:, below] - distances[:, above]))
    return F.smooth_l1_loss(distances, wanted, beta=0.5) + 0.3 * pairs.mean()


def train(orders: Described, *, epochs: int, seed: int) -> Any:
    """Train a ranker, and return the module."""
    torch.manual_seed(seed)
    module = _ranked("ranked")(trained=False).module
    flat = orders.found.flatten(0, 1)
    module.mean.copy_(flat.mean(0))
    module.deviation.copy_(flat.std(0) + 1e-3)
    optimiser = torch.optim.AdamW(module.parameters(), lr=2e-3, weight_decay=0.05)
    module.train()
    for epoch in range(epochs):
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * max(0.02, 1.0 - epoch / epochs)
        for rows in torch.split(torch.randperm(len(orders.found)), 64):
            found = orders.found[rows].flatten(0, 1)
            tilted = F.smooth_l1_loss(module.tilt(found) / 5, orders.tilts[rows].flatten() / 5)
            optimiser.zero_grad()
            loss = loss_of(module.distance(found).reshape(-1, CHAIN), orders.distances[rows])
            torch.autograd.backward(loss + 0.5 * tilted)
            optimiser.step()
    return module.eval()


def accuracy(module: Any, orders: Described) -> dict[str, tuple[float, float, int]]:
    """Return the accuracy by kind of damage.

    Returns:
        By kind: the share of clear pairs in the right order, the same for pairs with the photo, and the number of
        orders with a clear pair.
    """
    above, below = torch.triu_indices(CHAIN, CHAIN, 1)
    with torch.inference_mode():
        distances = module.distance(orders.found.flatten(0, 1)).reshape(-1, CHAIN)
    right = (distances[:, above] < distances[:, below]).float()
    clear = orders.distances[:, below] - orders.distances[:, above] > _CLEAR
    found = {}
    for kind in ("all", *sorted(set(orders.kinds))):
        chosen = clear & torch.tensor([kind in ("all", each) for each in orders.kinds])[:, None]
        photo = chosen & (above == 0)
        found[kind] = (float(right[chosen].mean()), float(right[photo].mean()), int(chosen.any(1).sum()))
    return found


def read_exploits(files: Sequence[Path]) -> list[Exploit]:
    """Read the exploits in all files, which the command `exploits` wrote.

    Each file has a JSON list of objects with the fields of `Exploit`.

    Raises:
        ValueError: a file has other contents.
    """
    found = list[Exploit]()
    for file in files:
        try:
            found += [Exploit(**each) for each in json.loads(file.read_text())]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file} holds no exploits as 'photo_ranking exploits' writes them: {error}") from error
    return found


def find_exploits(run: Path, folder: Path, *, episodes: int, seed: int) -> list[Exploit]:
    """Play a policy on training photos, every second one intact, and return its exploits, the worst first.

    The juror is the one that the policy was trained with.

    Args:
        run: folder of a photo training.
        folder: folder of photographs.
        episodes: number of episodes to play.
    """
    policy = Policy(choose(run))
    found: list[Exploit] = []
    rng = np.random.default_rng(seed)
    with policy.environment({"split": "training", "photos": str(folder)}) as made:
        environment: Any = made
        for number in range(episodes):
            photo, drawn, intact = str(rng.choice(environment.photos)), int(rng.integers(2**31)), number % 2 == 1
            seen, info = environment.reset(seed=drawn, options={"photo": photo, "intact": intact})
            over = False
            while not over:
                seen, _, over, _, info = environment.step(policy(seen[None])[0])
            gain = info["score"] - info["score_before"]
            away = environment.nearer() * -1.0
            if gain > 0 and away > 0:
                found.append(Exploit(info["degradation"], info["edits"], gain, away, photo, drawn, intact))
    return sorted(found, key=lambda each: -each.away)


def found_on(photos: Sequence[Photo], exploit: Exploit) -> Image:
    """Return the undamaged picture that an exploit was found on, as the environment cropped it.

    Args:
        photos: the environment's photos, in the same order.

    Raises:
        ValueError: the exploit's photo is not among them, or its seed gives a different damage.
    """
    named = {photo.name: photo for photo in photos}
    rng = seeding.np_random(exploit.seed)[0]
    rng.integers(len(named))
    crop = named[exploit.photo].crop(rng) if exploit.photo in named else None
    damage = Degradation() if exploit.intact else draw(rng)
    if crop is None or damage.as_dict() != exploit.degradation:
        raise ValueError(
            f"the exploit on {exploit.photo} was found among other photos, or damaged otherwise: find it anew"
        )
    return crop


def paid_for(
    scorer: Scorer, photos: Sequence[Photo], exploits: Sequence[Exploit], *, price: float, there: bool, seed: int = 2
) -> npt.NDArray[np.float64]:
    """Return what each exploit gains under a juror: the change of score minus price, float64 (exploits,).

    Args:
        photos: photos to apply the exploits to.
        price: see `PhotoEdit`.
        there: apply each exploit to the picture that it was found on; otherwise to photos drawn with `seed`.

    Raises:
        ValueError: with `there`, an exploit's photo is not among `photos`, or its seed gives a different damage.
    """
    library, rng, gains = PhotoLibrary(tuple(photos), tuple(photos)), np.random.default_rng(seed), list[float]()
    environment = PhotoEdit(scorer, library=library, price=price)
    for each in exploits:
        edits = Edits(**each.edits)
        crop = found_on(photos, each) if there else photos[int(rng.integers(len(photos)))].crop(rng)
        damaged = degrade(crop, Degradation(**each.degradation))  # type: ignore[arg-type]
        gains.append(environment.worth(damaged, edits) - environment.worth(damaged, Edits()))
    return np.array(gains)


def _ranked(name: str) -> Any:
    # Trainings do not import the server package; they import a juror's factory by name, as configurations do.
    return getattr(importlib.import_module(JUROR), name)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(given: Sequence[str] | None = None) -> None:
    """Run one of the commands `gather`, `train`, `evaluate`, `exploits` and `paid`."""
    parser = argparse.ArgumentParser(prog="photo_ranking", description=__doc__)
    parser.add_argument("what", choices=("gather", "train", "evaluate", "exploits", "paid"))
    parser.add_argument("--photos", type=Path, required=True, help="folder of photographs")
    parser.add_argument("--root", type=Path, default=Path("/"), help="gather: where the packages are unpacked")
    parser.add_argument("--out", type=Path, help="train, exploits: the file to write")
    parser.add_argument("--weights", type=Path, help="evaluate, paid: weights; default: those that ship")
    parser.add_argument("--exploits", type=Path, nargs="+", default=[], help="files that the command exploits wrote")
    parser.add_argument("--drawn", action="store_true", help="train: exploits on drawn photos, not on their own")
    parser.add_argument("--orders", type=int, default=2400, help="train: number of orders")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--run", type=Path, help="exploits: folder of a photo training")
    parser.add_argument("--episodes", type=int, default=_EPISODES, help="exploits: half of them on intact photos")
    parser.add_argument("--juror", default="jurybox.server.jurors:ranked", help="paid: the juror's factory")
    parser.add_argument("--price", type=float, default=0.0, help="paid: price for each unit of CIELAB")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(given)
    if options.out is None and options.what in ("train", "exploits"):
        parser.error(f"{options.what} needs --out, the file to write")
    torch.set_num_threads(1)  # a second thread slows down so small a network, and changes the order of sums
    cv2.setNumThreads(0)
    if options.what == "gather":
        try:
            _print(f"{gather(options.root, options.photos)} photographs are in {options.photos}")
        except FileNotFoundError as error:
            parser.exit(1, f"{error}\n")
        return
    if options.what == "exploits":
        worst = find_exploits(options.run, options.photos, episodes=options.episodes, seed=options.seed)
        options.out.write_text(json.dumps([asdict(each) for each in worst], indent=1))
        for side, among in (("intact", True), ("damaged", False)):
            these = [each for each in worst if each.intact == among]
            away, gain = (np.mean([getattr(each, name) for each in these] or 0.0) for name in ("away", "gain"))
            of = options.episodes // 2 if among else options.episodes - options.episodes // 2
            _print(f"{side}: {len(these)} of {of} episodes, {away:.2f} away on average, for {gain:+.4f} of score")
        return
    from safetensors.torch import load_file, save_file

    library, exploits = photographs(options.photos), read_exploits(options.exploits)
    _print(f"{len(library.training)} photographs to train on, {len(library.held_out)} held out")
    if options.what == "paid":
        scorer = LocalScorer(
            options.juror, {} if options.weights is None else {"weights": str(options.weights)}, threads=1
        )
        for side, photos in (("where they were found", library.training), ("held out", library.held_out)):
            paid = paid_for(scorer, photos, exploits, price=options.price, there=photos is library.training)
            _print(f"{side}: {paid.mean():+.4f} for each on average, {(paid > 0).sum()} of {len(paid)} pay")
        return
    if options.what == "train":
        orders = described(library.training, range(options.orders), options.seed)
        if exploits:
            numbers, there = range(options.orders // 5), not options.drawn
            orders = joined(orders, described(library.training, numbers, options.seed, exploits, there=there))
        module = train(orders, epochs=options.epochs, seed=options.seed)
        save_file({name: tensor.contiguous() for name, tensor in module.state_dict().items()}, options.out)
        _print_accuracy("training", accuracy(module, orders))
    else:
        module = _ranked("ranked")(trained=options.weights is None).module
        if options.weights is not None:
            module.load_state_dict(load_file(options.weights))
    orders = described(library.held_out, range(_HELD_OUT_ORDERS), options.seed + 1)
    if exploits:
        orders = joined(orders, described(library.held_out, range(_HELD_OUT_ORDERS // 3), options.seed + 1, exploits))
    _print_accuracy("held out", accuracy(module, orders))


def _print_accuracy(side: str, found: dict[str, tuple[float, float, int]]) -> None:
    for kind, (pairs, first, orders) in found.items():
        _print(f"{side}, {kind}: {pairs:.3f} of the pairs, {first:.3f} of those with the photo, {orders} orders")


if __name__ == "__main__":
    main()
