"""The ranked juror on the photographs that neither it nor the demo's policy was trained on."""

from __future__ import annotations

import json
import tomllib
from contextlib import contextmanager
from dataclasses import asdict, replace

import cv2
import numpy as np
import pytest
import torch
from benchmarks import photo_ranking
from safetensors.torch import save_file
from torch.nn import functional

from jurybox.server.jurors import jury, ranked
from jurybox.server.jurors.ranking import _blurred, _halved, _luma, _ordered, _stops, statistics
from jurybox.studies.photo.environment import PhotoEdit, PhotoLibrary
from jurybox.studies.photo.environment.edits import TOOLS, Degradation, Edits, apply, degrade, draw


@pytest.fixture(scope="module")
def photos():
    return [photo.centre() for photo in PhotoLibrary.shipped().held_out]


def marks(module, pictures):
    with torch.inference_mode():
        return module(image=torch.from_numpy(np.stack(pictures)))


def test_a_photo_is_ranked_above_its_damaged_copies(photos):
    module = ranked().module
    right = []
    for photo in photos:
        damaged = [degrade(photo, draw(np.random.default_rng(seed))) for seed in range(5)]
        score = marks(module, [photo, *damaged])["score"].numpy()
        right += list(score[0] > score[1:])
    assert np.mean(right) >= 0.8


def test_an_edited_photo_is_ranked_below_what_it_was(photos):
    module = ranked().module
    overdone = [Edits(contrast=1.2), Edits(saturation=1.5), Edits(exposure=1.2), Edits(sharpness=2.0)]
    right = []
    for photo in photos:
        score = marks(module, [photo, *(apply(photo, each) for each in overdone)])["score"].numpy()
        right += list(score[0] > score[1:])
    assert np.mean(right) >= 0.75


def test_a_photo_is_ranked_above_its_copies_with_a_cast_alone(photos):
    module = ranked().module
    casts = [{"temperature": 1.2}, {"temperature": 0.8}, {"temperature": -0.8}, {"tint": 0.3}, {"tint": -0.3}]
    right = []
    for photo in photos:
        score = marks(module, [photo, *(degrade(photo, Degradation(**each)) for each in casts)])["score"].numpy()
        right += list(score[0] > score[1:])
    assert np.mean(right) >= 0.7


def test_a_cast_adds_the_same_to_all_ratios_of_light_and_an_exposure_to_all_levels(photos):
    grey = (photos[0] // 2 + 50).astype(np.uint8)  # nothing is black or clipped
    changes = (Edits(), Edits(temperature=0.4), Edits(tint=0.2), Edits(exposure=-0.6))
    small = np.stack([cv2.resize(apply(grey, each), (48, 48), interpolation=cv2.INTER_AREA) for each in changes])
    found = _stops(torch.from_numpy(small).permute(0, 3, 1, 2).float() / 255).numpy()
    warmth, magenta, levels = np.split(found[1:] - found[0], [13, 26], axis=1)
    for apart, wanted in ((warmth[0], 0.4), (magenta[1], 0.2), (levels[2], -0.6)):
        assert apart == pytest.approx(wanted, abs=0.15 * abs(wanted))


def test_the_jury_is_the_mean_of_the_ranked_juror_and_the_panel(photos):
    given = marks(jury(share=0.25).module, photos)
    panel = torch.stack([given[name] for name in ("naturalness", "exposure", "colour", "sharpness")]).mean(0)
    assert torch.allclose(given["score"], 0.25 * given["ranked"] + 0.75 * panel, atol=1e-5)
    assert torch.equal(given["ranked"], marks(ranked().module, photos)["score"])
    with pytest.raises(ValueError, match="expected 0 to 1"):
        jury(share=1.5)


@pytest.mark.parametrize(("share", "good"), [(-0.01, False), (0.0, True), (1.0, True), (1.01, False)])
def test_the_ranked_jurors_share_is_between_nothing_and_all(share, good):
    if good:
        assert jury(share).module.share == share
    else:
        with pytest.raises(ValueError, match=f"share is {share}: expected 0 to 1"):
            jury(share)


def test_other_weights_are_served_from_their_file_and_a_file_of_something_else_is_refused(photos, tmp_path):
    torch.manual_seed(5)
    other = ranked(trained=False).module.eval()
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    served = ranked(weights=str(tmp_path / "other.safetensors")).module
    assert torch.equal(marks(served, photos)["score"], marks(other, photos)["score"])
    beside = jury(weights=str(tmp_path / "other.safetensors")).module
    assert torch.equal(marks(beside, photos)["ranked"], marks(other, photos)["score"])
    save_file({"mean": torch.zeros(3)}, tmp_path / "small.safetensors")
    (tmp_path / "text.safetensors").write_text("no weights at all")
    for name in ("missing", "small", "text"):
        with pytest.raises(ValueError, match=f"no weights of the ranked juror in .*{name}.safetensors"):
            ranked(weights=str(tmp_path / f"{name}.safetensors"))


class Brightness:
    """Prefers light images."""

    def __init__(self):
        self.buffer = np.zeros((384, 384, 3), np.uint8)

    def score(self):
        return float(self.buffer.mean()) / 255.0

    def close(self):
        pass


class Lightens:
    """A policy that only increases the brightness."""

    def __init__(self, found):
        pass

    def __call__(self, rows):
        return np.repeat(np.array([TOOLS], dtype=object) == "exposure", len(rows), axis=0).astype(np.float32) * 0.4

    @contextmanager
    def environment(self, changes):
        assert changes["split"] == "training"
        yield PhotoEdit(Brightness())


def test_an_exploit_is_found_by_score_and_distance_and_checked_on_its_own_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(photo_ranking, "Policy", Lightens)
    monkeypatch.setattr(photo_ranking, "choose", lambda run: run)
    found = photo_ranking.find_exploits(tmp_path, tmp_path, episodes=6, seed=0)
    assert sum(each.intact for each in found) == 3, "what lightens an intact photo is an exploit"
    assert all(each.gain > 0 and each.away > 0 for each in found)
    assert [each.away for each in found] == sorted((each.away for each in found), reverse=True)
    file = tmp_path / "found.json"
    file.write_text(json.dumps([asdict(each) for each in found]))
    again = photo_ranking.read_exploits([file, file])
    assert again == found + found
    photos = PhotoLibrary.shipped().training
    paid = photo_ranking.paid_for(Brightness(), photos, found, price=0.0, there=True)
    assert paid == pytest.approx([each.gain for each in found])
    dearer = photo_ranking.paid_for(Brightness(), photos, found, price=0.01, there=True)
    assert (dearer < paid).all()
    held_out = photo_ranking.paid_for(Brightness(), PhotoLibrary.shipped().held_out, found, price=0.0, there=False)
    assert held_out.shape == paid.shape and (held_out > 0).all()
    orders = photo_ranking.described(photos, range(2), 0, found[:1], there=True)
    picture = photo_ranking.found_on(photos, found[0])
    assert orders.kinds == ("exploit", "exploit")
    for first in orders.found[:, 0]:
        assert torch.allclose(first, statistics(torch.from_numpy(picture[None]))[0], atol=1e-4), "of the very picture"
    other = [replace(found[0], degradation={**found[0].degradation, "haze": 0.123})]
    with pytest.raises(ValueError, match="find it anew"):
        photo_ranking.paid_for(Brightness(), photos, other, price=0.0, there=True)


def test_a_file_that_holds_no_exploits_is_named(tmp_path):
    for text in ('[{"degradation": {}, "edits": {}}]', "nothing", "[1]"):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match="other.json holds no exploits"):
            photo_ranking.read_exploits([tmp_path / "other.json"])


def test_orders_of_pictures_begin_with_the_photo_and_go_away_from_it(photos):
    exploit = ({"haze": 0.5, "tilt": 3.0}, {"contrast": 1.0, "straighten": 2.0})
    for number in range(12):
        rng = np.random.default_rng(number)
        made = photo_ranking.order(photos[0], rng, exploit if number % 4 == 0 else None)
        assert len(made.pictures) == photo_ranking.CHAIN and np.array_equal(made.pictures[0], photos[0])
        assert made.distances[0] == 0 and list(made.distances) == sorted(made.distances)


def test_an_order_of_casts_changes_nothing_but_the_light_of_each_channel(photos, monkeypatch):
    assert dict(zip(photo_ranking._KINDS, photo_ranking._HOW_OFTEN, strict=True))["cast"] > 0
    monkeypatch.setattr(photo_ranking, "_HOW_OFTEN", [float(kind == "cast") for kind in photo_ranking._KINDS])
    made = photo_ranking.order(photos[0], np.random.default_rng(1))
    assert made.kind == "cast" and made.tilts == (0.0,) * photo_ranking.CHAIN
    luma = [cv2.cvtColor(each, cv2.COLOR_RGB2GRAY).mean() for each in made.pictures]
    assert np.ptp(luma) < 8, "as bright as the photo"
    warmth = [float(np.mean(each[..., 0].astype(float) - each[..., 2])) for each in made.pictures]
    assert sorted(warmth) in (warmth, warmth[::-1]) and abs(warmth[-1] - warmth[0]) > 5
    for channel in range(3):
        for value in np.unique(photos[0][..., channel]):
            assert len(np.unique(made.pictures[-1][..., channel][photos[0][..., channel] == value])) == 1


def test_distances_that_are_expected_are_learned_as_numbers_and_not_as_an_order_alone():
    wanted = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0]])
    apart = photo_ranking.loss_of(wanted, wanted)
    assert apart < photo_ranking.loss_of(wanted + 1.0, wanted)
    assert apart < photo_ranking.loss_of(wanted.flip(1), wanted)


def test_a_mirrored_picture_is_tilted_the_other_way(photos):
    module = ranked().module
    tilted = degrade(photos[1], Degradation(tilt=5.0))
    with torch.inference_mode():
        tilts = module.tilt(statistics(torch.from_numpy(np.stack([tilted, tilted[:, ::-1]]))))
    assert float(tilts[0]) == pytest.approx(-float(tilts[1]), abs=0.5)


def test_the_list_of_photographs_names_package_licence_and_author(tmp_path, monkeypatch):
    listed = tomllib.loads(photo_ranking.LIST.read_text())["photograph"]
    for each in listed:
        assert each["name"] and each["package"] and each["licence"] and each["author"]
    installed = [each for each in listed if "module" in each]  # the others need packages of Debian
    lines = ["\n".join(f"{key} = {json.dumps(value)}" for key, value in each.items()) for each in installed]
    (tmp_path / "list.toml").write_text("".join(f"[[photograph]]\n{line}\n" for line in lines))
    monkeypatch.setattr(photo_ranking, "LIST", tmp_path / "list.toml")
    assert photo_ranking.gather(tmp_path / "nothing", tmp_path / "photos") == len(installed) > 0
    library = photo_ranking.photographs(tmp_path / "photos")
    names = {photo.name for photo in library.training}
    assert not names & {"chelsea.png", "china.jpg"}


@pytest.mark.parametrize("what", ["train", "exploits"])
def test_a_missing_output_file_is_an_error_before_the_work(tmp_path, what, capsys):
    with pytest.raises(SystemExit):
        photo_ranking.main([what, "--photos", str(tmp_path), "--run", str(tmp_path)])
    assert f"{what} needs --out" in capsys.readouterr().err


def test_photographs_that_are_missing_are_an_error_that_counts_them(tmp_path, capsys):
    (tmp_path / "packages").mkdir()
    with pytest.raises(SystemExit) as ended:
        photo_ranking.main(["gather", "--root", str(tmp_path / "packages"), "--photos", str(tmp_path / "photos")])
    listed = tomllib.loads(photo_ranking.LIST.read_text())["photograph"]
    said = capsys.readouterr().err
    assert ended.value.code == 1 and not (tmp_path / "photos").exists(), (
        "a training would start on the few that are there"
    )
    missing = int(said.split()[0])
    assert f"{missing} of {len(listed)} photographs are missing" in said and len(said.splitlines()) == 1 + missing


@pytest.mark.parametrize("of", ["halves", "means", "order", "luma"])
def test_what_is_computed_from_shifted_planes_is_what_torch_defines(of):
    planes = torch.rand(2, 3, 37, 50, generator=torch.Generator().manual_seed(1))
    found, defined = {
        "halves": lambda: (_halved(planes), functional.avg_pool2d(planes, 2)),
        "means": lambda: (_blurred(planes, 5), functional.avg_pool2d(planes, 5, 1)),
        "order": lambda: (_ordered(planes), planes.sort(dim=-1).values),
        "luma": lambda: (_luma(planes), functional.conv2d(planes, torch.tensor([[[[0.299]], [[0.587]], [[0.114]]]]))),
    }[of]()
    torch.testing.assert_close(found, defined)


def test_statistics_are_those_that_the_shipped_weights_were_trained_with():
    """With others every score would be wrong and none would look so: these numbers change with new weights only."""
    generator = np.random.default_rng(5)
    coarse = torch.from_numpy(generator.integers(0, 256, (3, 3, 12, 12)).astype(np.float32))
    smooth = functional.interpolate(coarse, (384, 384), mode="bicubic", align_corners=True) * 1.1 - 12
    noise = torch.from_numpy(generator.normal(0, (2, 8, 20), (384, 384, 3, 3)).astype(np.float32))
    pictures = (smooth + noise.permute(3, 2, 0, 1)).clamp(0, 255).permute(0, 2, 3, 1).round().to(torch.uint8)
    found = statistics(pictures)
    waves = torch.stack([torch.cos(torch.arange(found.shape[1]) * k) for k in (0.0, 0.7, 1.9)], dim=1)
    expected = [[-326.607, -2.736, 11.573], [-317.806, -0.430, 11.014], [-310.616, -0.035, 8.765]]
    torch.testing.assert_close(found @ waves, torch.tensor(expected), atol=0.01, rtol=0)
    assert marks(ranked().module, pictures.numpy())["score"].tolist() == pytest.approx([0.4851, 0.4459, 0.4], abs=1e-3)


def test_a_picture_can_be_improved_along_the_gradient_of_its_score(photos):
    picture = torch.from_numpy(photos[0][None]).float().requires_grad_()
    ranked().module(image=picture)["score"].sum().backward()
    assert picture.grad.isfinite().all() and picture.grad.abs().max() > 0
