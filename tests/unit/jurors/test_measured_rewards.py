"""Rewards without weights: how far a text is from what was read, how a program reads it, and the size of a JPEG."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from jurybox.server import jurors
from jurybox.server.jurors import measures
from jurybox.server.jurors.measures import match, tesseract, wanted
from jurybox.server.models import RowErrors


@pytest.mark.parametrize(
    ("expected", "read", "distance"),
    [
        ("open", "op", 2),
        ("open", "oxpen", 1),
        ("open", "opxen", 1),
        ("open", "pen", 1),
        ("open", "ope", 1),
        ("open", "nepo", 4),
        ("open", "poen", 2),
        ("open", "apexm", 3),
        ("abcdef", "azced", 3),
        ("aaaa", "aa", 2),
        ("flaw", "lawn", 2),
        ("o", "", 1),
    ],
)
def test_the_distance_is_the_least_number_of_letters_to_add_remove_or_replace(expected, read, distance):
    assert match(expected, read) == pytest.approx(1 - distance / len(expected))


@pytest.mark.parametrize(
    ("expected", "read", "score"),
    [
        ("Open", "oPEN", 1.0),
        ("o p\n\te n", "open", 1.0),
        ("open", "o\n pe\tn", 1.0),
        ("open", "it is open today", 1.0),
        ("open", "closed all day long", 0.0),
        ("ab", "xxxxxx", 0.0),
        ("ab", "bxxxxa", 0.0),
    ],
)
def test_spaces_and_case_do_not_count_and_the_worst_score_is_zero(expected, read, score):
    assert match(expected, read) == score


@pytest.mark.parametrize("prompt", ["a sign", 'a sign that says "open', 'says ""', 'says "  \n"', ""])
def test_a_prompt_without_letters_between_quotation_marks_asks_for_nothing(prompt):
    with pytest.raises(ValueError, match='the prompt has nothing between quotation marks, .* a sign that says "open"'):
        wanted(prompt)


def test_a_text_that_is_asked_for_may_have_lines():
    assert wanted('two lines: "open\nall day", "never"') == "open\nall day"


READS = """#!/bin/sh
echo "$@" > {folder}/arguments
cat > {folder}/picture.png
printf 'Open \\377 day'
exit {status}
"""


def program(folder: Path, status: int) -> None:
    """Write a program of the name that notes what it is given, and reads the same in every picture."""
    file = folder / "tesseract"
    file.write_text(READS.format(folder=folder, status=status))
    file.chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program(tmp_path, 0)
    return tmp_path


PICTURE = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)


def test_tesseract_gets_the_picture_as_it_is_and_what_it_says_is_the_text(folder):
    assert tesseract(PICTURE) == "Open \ufffd day"
    assert (folder / "arguments").read_text().split() == ["stdin", "stdout", "--psm", "11"]
    with Image.open(folder / "picture.png") as picture:
        assert picture.format == "PNG" and np.array_equal(np.asarray(picture), PICTURE)


def test_a_picture_that_tesseract_fails_on_fails_alone_with_its_status(folder):
    served = jurors.ocr_match()
    images = [torch.from_numpy(PICTURE)] * 2
    assert served.module(images, [b'"open"', b'"day"'])["score"].tolist() == [1.0, 1.0]
    program(folder, 3)
    found = served.module(images[:1], [b'"open"'])
    assert isinstance(found, RowErrors) and "returned non-zero exit status 3" in found.errors[0]


def test_a_picture_that_tesseract_does_not_finish_fails_alone(folder, monkeypatch):
    (folder / "tesseract").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(measures, "_TIMEOUT", 0.1)
    found = jurors.ocr_match().module([torch.from_numpy(PICTURE)], [b'"open"'])
    assert isinstance(found, RowErrors) and "timed out after 0.1 seconds" in found.errors[0]


def reads_by_height(image):
    """What reading a picture of so many rows gives or raises."""
    errors = {1: OSError("no memory"), 2: subprocess.TimeoutExpired("tesseract", 30), 3: ValueError("odd")}
    if image.shape[0] == 9:
        raise KeyError("a mistake")
    if image.shape[0] in errors:
        raise errors[image.shape[0]]
    return "open"


def test_errors_of_reading_fail_their_rows_and_mistakes_of_the_reader_the_batch():
    served = jurors.ocr_match(f"{__name__}:reads_by_height")
    images = [torch.zeros(n, 4, 3, dtype=torch.uint8) for n in (1, 4, 2, 3)]
    found = served.module(images, [b'"open"'] * 4)
    assert list(found.errors) == [0, 2, 3] and found.errors[0] == "no memory" and found.errors[3] == "odd"
    assert "timed out after 30 seconds" in found.errors[2]
    assert found.outputs["score"].tolist() == [0, 1, 0, 0] and found.outputs["score"].dtype == torch.float32
    with pytest.raises(KeyError, match="a mistake"):
        served.module([torch.zeros(9, 4, 3, dtype=torch.uint8)], [b'"open"'])


@pytest.mark.parametrize("reader", ["", "module", ":function", "module:"])
def test_a_reader_is_a_module_and_a_function_of_it(reader):
    with pytest.raises(ValueError, match=f'reader is {reader!r}: expected "tesseract" or "module:function"'):
        jurors.ocr_match(reader)


@pytest.mark.parametrize("quality", [0, 96, -1])
def test_a_quality_that_jpeg_does_not_have_is_refused(quality):
    with pytest.raises(ValueError, match=f"quality is {quality}: expected 1 to 95"):
        jurors.jpeg_size(quality)


@pytest.mark.parametrize("quality", [1, 95])
def test_the_score_of_a_jpeg_is_its_size_in_the_quality_and_at_the_price_that_are_asked_for(quality):
    served = jurors.jpeg_size(quality, per_kilobyte=2.0)
    sink = io.BytesIO()
    Image.fromarray(PICTURE).save(sink, "JPEG", quality=quality)
    found = served.module([torch.from_numpy(PICTURE)])
    assert found["kilobytes"].tolist() == pytest.approx([sink.tell() / 1000])
    assert found["score"].tolist() == pytest.approx([sink.tell() / 500])


@pytest.mark.parametrize("juror", [jurors.jpeg_size, lambda **given: jurors.ocr_match("math:sqrt", **given)])
def test_pictures_have_a_megapixel_or_as_many_as_are_asked_for(juror):
    assert juror().inputs["image"].capacity == 3 * 1024 * 1024 == 3 * measures._PIXELS
    assert juror(pixels=100).inputs["image"].capacity == 300
