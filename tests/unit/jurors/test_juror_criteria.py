"""What every criterion keeps: its range, its gradient, its rows apart, and its temper on strange images."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from jurybox.server.jurors.criteria import CRITERIA, Colour, Criterion, Exposure, Sharpness, plausible, slices
from jurybox.server.jurors.panels import example_images

Images = npt.NDArray[np.uint8]


@pytest.fixture(params=CRITERIA, ids=[criterion.name for criterion in CRITERIA])
def criterion(request: pytest.FixtureRequest) -> Criterion:
    return request.param().eval()


def strange_images() -> torch.Tensor:
    size = 64
    images = torch.zeros(9, size, size, 3)
    images[1] = 255
    images[2] = 128
    images[3] = torch.tensor([255.0, 0.0, 0.0])
    images[4, :, : size // 2] = 255
    images[5, ::2, ::2] = 255
    images[6, 0, 0] = 255
    images[7] = torch.linspace(0, 255, size)[:, None, None]
    images[8] = torch.rand(size, size, 3, generator=torch.Generator().manual_seed(0)) * 255
    return images


def test_constant_and_extreme_images_get_finite_marks(criterion: Criterion) -> None:
    marks = criterion(strange_images().to(torch.uint8))
    assert marks.dtype == torch.float32
    assert torch.isfinite(marks).all()
    assert ((marks >= 0) & (marks <= 1)).all()


def test_constant_and_extreme_images_get_finite_gradients(criterion: Criterion) -> None:
    images = strange_images().requires_grad_()
    criterion(images).sum().backward()
    assert images.grad is not None
    assert torch.isfinite(images.grad).all()


def test_a_float_image_is_marked_as_the_same_bytes(criterion: Criterion) -> None:
    images = example_images(2, 96)
    torch.testing.assert_close(criterion(images.float()), criterion(images))


def test_a_row_is_marked_alike_alone_and_in_any_batch(criterion: Criterion) -> None:
    images = example_images(11, 384)
    with torch.inference_mode():
        together = criterion(images)
        alone = torch.cat([criterion(image[None]) for image in images])
    torch.testing.assert_close(together, alone, rtol=0, atol=5e-5)


def test_following_the_gradient_raises_the_mark(criterion: Criterion) -> None:
    # Noisy, dark, garish and sharp at once: every criterion has something to complain about.
    images = example_images(2, 128).float()
    grey = images.mean(dim=-1, keepdim=True)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    images = ((grey + 6 * (images - grey)) * 0.35 + 25 * noise).clamp(1, 254).requires_grad_()
    before = criterion(images)
    (gradient,) = torch.autograd.grad(before.sum(), images)
    assert (gradient.abs().amax(dim=(1, 2)) > 0).all(), "no gradient reached one of the channels"
    step = 4 * gradient / gradient.flatten(1).abs().amax(dim=1)[:, None, None, None]
    with torch.no_grad():
        after = criterion(images + step)
    assert (after > before).all(), (before, after)


@pytest.mark.parametrize("image", [torch.zeros(384, 384, 3), torch.zeros(1, 3, 384, 384), torch.zeros(0, 64, 64, 3)])
def test_an_image_of_another_shape_is_refused(image: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected \(n, height, width, 3\)"):
        Exposure()(image)


def test_an_image_of_another_integer_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"int64: expected uint8"):
        Exposure()(torch.zeros(1, 64, 64, 3, dtype=torch.int64))


def test_exposure_falls_with_every_fault_of_light(photographs: dict[str, Images]) -> None:
    original = torch.from_numpy(photographs["motorcycle"]).float()
    exposure = Exposure()
    best = exposure(original)
    for fault in (original * 0.4, original * 2.5, original * 0.3 + 90, (original - 100) * 4):
        assert (exposure(fault.clamp(0, 255)) < best - 0.1).all()


def test_exposure_falls_when_black_is_no_longer_black(photographs: dict[str, Images]) -> None:
    original = torch.from_numpy(photographs["motorcycle"]).float()
    exposure = Exposure()
    assert (exposure(original.clamp(min=70)) < exposure(original) - 0.08).all()


def test_colour_falls_for_a_cast_that_clips_nothing(photographs: dict[str, Images]) -> None:
    neutral = torch.from_numpy(photographs["motorcycle"]).float() * 0.4 + 50
    colour = Colour()
    assert (colour(neutral * torch.tensor([1.6, 1.0, 0.3])) < colour(neutral) - 0.05).all()


def test_colour_falls_for_grey_casts_and_garishness(photographs: dict[str, Images]) -> None:
    original = torch.from_numpy(photographs["motorcycle"]).float()
    grey = original.mean(dim=-1, keepdim=True)
    colour = Colour()
    best = colour(original)
    cast = original * torch.tensor([1.6, 1.0, 0.3])
    for fault in (grey.expand_as(original), grey + 3 * (original - grey), cast):
        assert (colour(fault.clamp(0, 255)) < best - 0.1).all()


def test_sharpness_falls_with_every_step_of_sharpening(photographs: dict[str, Images]) -> None:
    original = torch.from_numpy(photographs["china"]).float()
    planes = original.permute(0, 3, 1, 2)
    soft = torch.nn.functional.avg_pool2d(planes, 5, stride=1, padding=2, count_include_pad=False)
    halo = (planes - soft).permute(0, 2, 3, 1)
    sharpness = Sharpness()
    marks = torch.stack([sharpness((original + amount * halo).clamp(0, 255)) for amount in (0.0, 0.8, 1.6, 3.2)])
    assert (marks.diff(dim=0) < 0).all()


def test_half_marks_are_one_unit_outside_the_range() -> None:
    values = torch.tensor([-1.0, 0.0, 0.5, 1.0, 4.0])
    marks = plausible(values, 0.0, 1.0, below=1.0, above=3.0)
    torch.testing.assert_close(marks, torch.tensor([0.5, 1.0, 1.0, 1.0, 0.5]))


@pytest.mark.parametrize(
    ("n", "size", "parts"), [(1, 384, [1]), (9, 384, [4, 4, 1]), (3, 768, [1, 1, 1]), (2, 900, [1, 1])]
)
def test_a_batch_is_marked_a_few_megapixels_at_a_time(n: int, size: int, parts: list[int]) -> None:
    assert [len(part) for part in slices(torch.zeros(n, size, size, 3, dtype=torch.uint8))] == parts
