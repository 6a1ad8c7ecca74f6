"""The panel prefers a photograph to its spoiled copies, on photographs it was and was not tuned on."""

from __future__ import annotations

from collections.abc import Callable

import cv2
import numpy as np
import numpy.typing as npt
import pytest
import torch

from jurybox.server.jurors import panel

Images = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

TUNED_ON = ("astronaut", "coffee", "rocket", "china", "flower")
HELD_OUT = ("chelsea", "motorcycle")


def luma(images: Floats) -> Floats:
    return (images @ np.array([0.299, 0.587, 0.114], np.float32))[..., None]


def sharpened(images: Floats) -> Floats:
    soft = np.stack([cv2.GaussianBlur(image, (0, 0), 1.5) for image in images])
    return images + 2.5 * (images - soft)


SPOILED: dict[str, Callable[[Floats], Floats]] = {
    "darkened": lambda images: images * 0.5,
    "washed out": lambda images: images * 0.5 + 100,
    "grey": lambda images: np.repeat(luma(images), 3, axis=-1),
    "over-saturated": lambda images: luma(images) + 2.5 * (images - luma(images)),
    "over-sharpened": sharpened,
}


def spoil(images: Images, fault: str) -> Images:
    return np.clip(np.rint(SPOILED[fault](images.astype(np.float32))), 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def preferred(photographs: dict[str, Images]) -> dict[str, dict[str, npt.NDArray[np.bool_]]]:
    """By fault and photograph: for which of three crops, a large one and two others, the panel prefers the original."""
    module = panel().module
    photographs = {name: images[::2] for name, images in photographs.items()}

    def score(images: Images) -> Floats:
        with torch.inference_mode():
            return module(torch.from_numpy(images))["score"].numpy()

    originals = {name: score(images) for name, images in photographs.items()}
    return {
        fault: {name: originals[name] > score(spoil(images, fault)) for name, images in photographs.items()}
        for fault in SPOILED
    }


@pytest.mark.parametrize("photographs_of", [TUNED_ON, HELD_OUT], ids=["tuned on", "held out"])
@pytest.mark.parametrize("fault", SPOILED)
def test_the_panel_prefers_the_original(
    fault: str, photographs_of: tuple[str, ...], preferred: dict[str, dict[str, npt.NDArray[np.bool_]]]
) -> None:
    wins = {name: preferred[fault][name] for name in photographs_of}
    share = np.concatenate(list(wins.values())).mean()
    detail = ", ".join(f"{name} {won.sum()}/{won.size}" for name, won in wins.items())
    assert share >= 0.8, f"{fault}: preferred in {share:.0%} of the crops ({detail})"


def test_no_photograph_is_better_spoiled(preferred: dict[str, dict[str, npt.NDArray[np.bool_]]]) -> None:
    for fault, wins in preferred.items():
        for name, won in wins.items():
            assert won.mean() >= 0.5, f"{name}: {fault} preferred in {won.size - won.sum()} of {won.size} crops"
