"""What the ranked juror finds in pictures of one colour, and of odd sizes and statistics."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from jurybox.server.jurors import ranked
from jurybox.server.jurors.ranking import _clipped, _colours, _details, _directions, _halved, _luma, _stops, statistics


def plain(red, green, blue, side=48):
    return torch.tensor([red, green, blue]).view(1, 3, 1, 1).expand(1, 3, side, side) / 255.0


def linear(value):
    encoded = value / 255.0
    return (encoded / 12.92 if encoded <= 0.04045 else ((encoded + 0.055) / 1.055) ** 2.4) + 1e-3


@pytest.mark.parametrize("colour", [(180, 120, 60), (10, 200, 240), (5, 5, 5), (128, 128, 128)], ids=str)
def test_every_estimate_of_the_light_of_one_colour_is_that_colour(colour):
    warmth, magenta, levels = _stops(plain(*colour))[0].split([13, 13, 7])
    red, green, blue = (math.log2(linear(value)) for value in colour)
    edges = 5  # there are none: their estimate is that of grey light
    for found, expected in ((warmth, red - blue), (magenta, 0.5 * (red + blue) - green)):
        assert found[edges].item() == pytest.approx(0, abs=1e-4)
        assert found.tolist()[:edges] + found.tolist()[edges + 1 :] == pytest.approx([expected] * 12, abs=2e-3)
    luminance = 0.2126 * linear(colour[0]) + 0.7152 * linear(colour[1]) + 0.0722 * linear(colour[2])
    assert levels.tolist() == pytest.approx([math.log2(luminance)] * 7, abs=1e-3)


def test_the_cast_of_one_colour_is_its_own_among_all_pixels_and_among_the_less_colourful_half():
    found = _colours(plain(180, 120, 60))[0]
    luma = (0.299 * 180 + 0.587 * 120 + 0.114 * 60) / 255
    cast = [value / 255 - luma for value in (180, 120, 60)]
    assert found[-6:].tolist() == pytest.approx(cast * 2, abs=1e-5)
    assert found[49:56].tolist() == pytest.approx(
        [180 / 255, 120 / 255, 60 / 255, luma, 60 / 255, 180 / 255, 120 / 255]
    )
    assert found[56:63].tolist() == pytest.approx([0] * 7, abs=1e-5), "nothing deviates"


def test_black_and_white_are_clipped_at_their_ends_and_grey_at_none():
    black, white, grey = (_clipped(plain(value, value, value))[0].exp() - 1e-3 for value in (0, 255, 128))
    assert black.tolist() == pytest.approx([1] * 3 + [0] * 3, abs=1e-5)
    assert white.tolist() == pytest.approx([0] * 3 + [1] * 3, abs=1e-5)
    assert grey.tolist() == pytest.approx([0] * 6, abs=1e-5)


def test_one_colour_has_no_details_and_no_directions():
    luma = _luma(plain(90, 90, 90, 384))
    octaves, rest = _details(luma)[0].split([6, 4])
    assert octaves.tolist() == pytest.approx([0.5 * math.log(1e-6)] * 6, abs=0.1)
    assert rest.tolist() == pytest.approx([math.log(1e-3)] * 3 + [0], abs=1e-3), "no noise, and no blocks"
    assert _directions(luma[:, 0]).tolist() == [[0] * 8]


@pytest.mark.parametrize("value", [0, 255])
def test_statistics_of_black_and_of_white_are_numbers(value):
    image = torch.full((2, 384, 384, 3), value, dtype=torch.uint8)
    assert statistics(image).isfinite().all()


@pytest.mark.parametrize("sign", [-1, 1])
def test_what_is_further_than_four_deviations_from_usual_counts_as_four(sign):
    module = ranked().module.eval()
    found = torch.stack([module.mean + sign * far * module.deviation for far in (3.5, 4, 4.5, 1000)])
    with torch.inference_mode():
        distances = module.distance(found)
    assert distances[2:].tolist() == pytest.approx([distances[1].item()] * 2, rel=1e-4)
    assert distances[0].item() != pytest.approx(distances[1].item(), rel=1e-4)


@pytest.mark.parametrize("sides", [(4, 6), (5, 6), (4, 7), (5, 7), (2, 3)], ids=str)
def test_means_of_four_pixels_leave_out_an_odd_line_and_an_odd_column(sides):
    planes = torch.rand(1, 2, *sides, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(_halved(planes), functional.avg_pool2d(planes, 2))


def test_of_two_colours_that_are_as_frequent_the_one_of_the_lower_ratios_is_the_neutral_one():
    """The median of an even number of pixels is the lower of two; the shipped weights were trained so."""
    lower, upper = (60, 150, 120), (180, 90, 110)
    picture = plain(*lower).clone()
    picture[..., 24:] = plain(*upper, side=24)[..., :1, :]
    found = _stops(picture)[0]
    red, green, blue = (math.log2(linear(value)) for value in lower)
    assert found[[4, 17]].tolist() == pytest.approx([red - blue, 0.5 * (red + blue) - green], abs=2e-3)
