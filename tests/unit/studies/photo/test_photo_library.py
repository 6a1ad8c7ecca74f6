from __future__ import annotations

import subprocess
import sys

import cv2
import numpy as np
import pytest

from jurybox.studies.photo.environment import Photo, PhotoError, PhotoLibrary
from jurybox.studies.photo.environment.photos import read_photo


def write(path, side=128, seed=0, suffix=".jpg"):
    small = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    done, data = cv2.imencode(suffix, cv2.resize(small, (side + 40, side)))
    assert done
    path.write_bytes(data.tobytes())
    return path


@pytest.fixture
def folder(tmp_path):
    for index in range(8):
        write(tmp_path / f"IMG_{index}.jpg", seed=index)
    write(tmp_path / "portrait.PNG", seed=9, suffix=".png")
    (tmp_path / "notes.txt").write_text("not a photo")
    return tmp_path


def test_the_shipped_photos_are_colour_photographs_and_enough_are_held_out():
    library = PhotoLibrary.shipped()
    photos = library.training + library.held_out
    assert len(library.training) == 5 and len(library.held_out) == 14 and library.skipped == ()
    for photo in photos:
        assert photo.pixels.dtype == np.uint8 and photo.pixels.shape[2] == 3
        assert np.ptp(photo.pixels.astype(int), axis=2).mean() > 10, f"{photo.name} is grey"


def test_held_out_photos_are_never_among_the_training_photos(library, folder):
    for split in (library, PhotoLibrary.from_folder(folder)):
        training, held_out = ({photo.name for photo in side} for side in (split.training, split.held_out))
        assert training and held_out and not training & held_out
    pixels = [photo.pixels.tobytes() for photo in library.training + library.held_out]
    assert len(set(pixels)) == len(pixels)


def test_photos_are_found_without_importing_the_packages_that_carry_them():
    program = (
        "import sys; from jurybox.studies.photo.environment import PhotoLibrary, PhotoConfig, build; "
        "PhotoLibrary.shipped(); build(PhotoConfig()); "
        "print(sorted({'torch', 'sklearn', 'skimage', 'scipy', 'stable_baselines3'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_pixels_are_red_green_blue(library):
    astronaut = next(photo for photo in library.training if photo.name == "astronaut.png")
    red, _, blue = astronaut.centre()[250:300, 60:120].reshape(-1, 3).mean(axis=0)
    assert red > blue + 60  # the suit is orange


@pytest.mark.parametrize("side", ["training", "held_out"])
def test_every_crop_is_384_pixels_square_and_repeatable(library, side):
    for photo in library.of(side):
        crops = [photo.crop(np.random.default_rng(seed)) for seed in (1, 1, 2)]
        for picture in (photo.centre(), *crops):
            assert picture.shape == (384, 384, 3) and picture.dtype == np.uint8 and picture.flags.c_contiguous
        assert np.array_equal(crops[0], crops[1]) and not np.array_equal(crops[0], crops[2])


def test_crops_come_mirrored_half_of_the_time():
    slope = np.repeat(np.arange(300, dtype=np.uint16)[None] * 255 // 300, 200, axis=0).astype(np.uint8)
    photo = Photo("slope", np.repeat(slope[:, :, None], 3, axis=2))
    rng = np.random.default_rng(0)
    crops = [photo.crop(rng) for _ in range(60)]
    mirrored = sum(crop[0, 0, 0] > crop[0, -1, 0] for crop in crops)
    assert 20 < mirrored < 40


def test_only_jpg_and_png_files_of_a_folder_are_used(folder):
    library = PhotoLibrary.from_folder(folder)
    names = {photo.name for photo in library.training + library.held_out}
    assert names == {f"IMG_{i}.jpg" for i in range(8)} | {"portrait.PNG"}
    assert len(library.held_out) == 2


def held_pixels(library):
    return {photo.pixels.tobytes() for photo in library.held_out}


def test_the_split_depends_on_content_alone(folder):
    first = PhotoLibrary.from_folder(folder)
    for number, path in enumerate(sorted(folder.glob("*.jpg"))):
        path.rename(folder / f"{99 - number} holiday.jpg")
    assert held_pixels(PhotoLibrary.from_folder(folder)) == held_pixels(first)


def scene(seed):
    """A picture with as much in it as a photo has: coarse shapes, finer ones, and grain."""
    rng = np.random.default_rng(seed)
    picture = np.zeros((300, 400, 3))
    for size, weight in ((4, 110), (16, 60), (64, 30)):
        picture += weight * cv2.resize(rng.random((size, size, 3)), (400, 300), interpolation=cv2.INTER_CUBIC)
    return np.clip(picture + rng.normal(0, 4, picture.shape), 0, 255).astype(np.uint8)


def copies(folder, seed):
    """One picture many times: as it is, under another name, encoded badly, as PNG, smaller, larger, lighter."""
    picture = scene(seed)
    cv2.imwrite(str(folder / f"{seed} a.jpg"), picture, [cv2.IMWRITE_JPEG_QUALITY, 95])
    (folder / f"{seed} b copy.jpg").write_bytes((folder / f"{seed} a.jpg").read_bytes())
    cv2.imwrite(str(folder / f"{seed} c.jpg"), picture, [cv2.IMWRITE_JPEG_QUALITY, 25])
    cv2.imwrite(str(folder / f"{seed} d.png"), picture)
    cv2.imwrite(str(folder / f"{seed} e.jpg"), cv2.resize(picture, (180, 135), interpolation=cv2.INTER_AREA))
    cv2.imwrite(str(folder / f"{seed} f.jpg"), cv2.resize(picture, (800, 600), interpolation=cv2.INTER_LINEAR))
    cv2.imwrite(str(folder / f"{seed} g.jpg"), np.clip(picture.astype(int) + 2, 0, 255).astype(np.uint8))


def test_copies_of_one_picture_are_all_on_one_side(tmp_path):
    for seed in range(5):
        copies(tmp_path, seed)
    library = PhotoLibrary.from_folder(tmp_path)
    sides = [{photo.name.split()[0] for photo in side} for side in (library.training, library.held_out)]
    assert not sides[0] & sides[1] and len(library.held_out) == 7 and len(library.training) == 28


def test_pictures_that_differ_are_no_copies(tmp_path):
    for seed in range(12):
        cv2.imwrite(str(tmp_path / f"{seed}.png"), scene(seed))
    assert len(PhotoLibrary.from_folder(tmp_path).held_out) == 3


def test_one_picture_and_its_copies_are_no_two_photos(tmp_path):
    copies(tmp_path, 1)
    with pytest.raises(PhotoError, match="all 7 .* are copies of one picture"):
        PhotoLibrary.from_folder(tmp_path)


def test_a_picture_with_many_copies_does_not_take_a_whole_side(tmp_path):
    copies(tmp_path, 1)
    cv2.imwrite(str(tmp_path / "another.png"), scene(2))
    library = PhotoLibrary.from_folder(tmp_path)
    assert {len(library.training), len(library.held_out)} == {1, 7}


def broken_files(folder):
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.png").write_text("this is no picture")
    whole = write(folder / "cut.jpg", side=400, seed=5).read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    whole = write(folder / "cut.png", side=400, seed=5, suffix=".png").read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    write(folder / "tiny.png", side=20, suffix=".png")
    return {"empty.jpg", "text.png", "cut.jpg", "cut.png", "tiny.png"}


def test_broken_photos_are_all_named_in_one_error(folder):
    names = broken_files(folder)
    with pytest.raises(PhotoError, match="5 of 14 photos") as caught:
        PhotoLibrary.from_folder(folder)
    assert all(name in str(caught.value) for name in names)


def test_broken_photos_can_be_skipped_and_are_counted(folder):
    names = broken_files(folder)
    library = PhotoLibrary.from_folder(folder, on_broken="skip")
    assert {line.split(":")[0] for line in library.skipped} == names
    assert not names & {photo.name for photo in library.training + library.held_out}


def test_a_photo_with_a_thumbnail_inside_that_was_cut_off_is_broken(tmp_path):
    thumbnail = write(tmp_path / "thumbnail.jpg", side=100).read_bytes()
    whole = write(tmp_path / "whole.jpg", side=400, seed=3).read_bytes()
    segment = b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail
    with_thumbnail = whole[:2] + segment + whole[2:]
    (tmp_path / "whole.jpg").write_bytes(with_thumbnail)
    assert read_photo(tmp_path / "whole.jpg").pixels.shape[0] == 400
    (tmp_path / "whole.jpg").write_bytes(with_thumbnail[:-1000])
    with pytest.raises(PhotoError, match="cut off"):
        read_photo(tmp_path / "whole.jpg")


def test_greyscale_and_transparent_photos_become_three_channels(tmp_path):
    for name, shape in (("grey.png", (200, 200)), ("clear.png", (200, 200, 4))):
        assert cv2.imwrite(str(tmp_path / name), np.full(shape, 90, dtype=np.uint8))
        assert read_photo(tmp_path / name).pixels.shape == (200, 200, 3)


def test_a_large_folder_is_sampled_evenly_and_this_is_reported(folder):
    library = PhotoLibrary.from_folder(folder, limit=3)
    assert len(library.training + library.held_out) == 3 and library.beyond_limit == 6


@pytest.mark.parametrize("count", [0, 1])
def test_a_folder_with_too_few_photos_is_refused(tmp_path, count):
    for index in range(count):
        write(tmp_path / f"{index}.jpg")
    with pytest.raises(PhotoError, match=f"at least two usable photos .* found {count}"):
        PhotoLibrary.from_folder(tmp_path)


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(PhotoError, match="expected a folder"):
        PhotoLibrary.from_folder(tmp_path / "nowhere")
