"""Rewards computed without weights: the text in an image, and the size of its JPEG."""

from __future__ import annotations

import importlib
import io
import re
import shutil
import subprocess
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from jurybox.protocol import TensorSpec
from jurybox.server.jurors.ready import SCORE, answer, image_input
from jurybox.server.models import RowErrors, ServedModel

Reader = Callable[[NDArray[np.uint8]], str]
_PIXELS = 1024 * 1024
_TIMEOUT = 30.0  # seconds that reading one image may take


class _JpegSize(nn.Module):
    def __init__(self, quality: int, per_kilobyte: float) -> None:
        super().__init__()
        self._quality, self._per_kilobyte = quality, per_kilobyte

    def forward(self, image: list[Tensor]) -> dict[str, Tensor]:
        kilobytes = torch.tensor([self._size(one) / 1000 for one in image], dtype=torch.float32)
        return {"score": kilobytes * self._per_kilobyte, "kilobytes": kilobytes}

    def _size(self, image: Tensor) -> int:
        sink = io.BytesIO()
        Image.fromarray(image.cpu().numpy()).save(sink, "JPEG", quality=self._quality)
        return sink.tell()


def jpeg_size(quality: int = 95, per_kilobyte: float = -1 / 500, pixels: int = _PIXELS) -> ServedModel:
    """Image compressibility: the size of the JPEG (Black et al., "Training Diffusion Models with RL", 2023).

    Args:
        quality: JPEG quality, 1 to 95.
        per_kilobyte: score per 1000 bytes. In DDPO and Flow-GRPO, compressibility has -1/500, incompressibility 1.
        pixels: number of pixels of the largest image.

    Returns:
        Input ``image`` uint8 (-1, -1, 3) RGB; outputs ``score`` and ``kilobytes`` (thousands of bytes), float32 ().

    Raises:
        ValueError: the quality is out of range.
    """
    if not 1 <= quality <= 95:
        raise ValueError(f"quality is {quality}: expected 1 to 95")
    outputs = {**SCORE, "kilobytes": TensorSpec("float32")}
    return ServedModel(_JpegSize(quality, per_kilobyte), {"image": image_input(pixels)}, outputs)


class _OcrMatch(nn.Module):
    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader

    def forward(self, image: list[Tensor], prompt: list[bytes]) -> dict[str, Tensor] | RowErrors:
        scores: list[float] = []
        wrong: dict[int, str] = {}
        for row, (one, text) in enumerate(zip(image, prompt, strict=True)):
            try:
                scores.append(match(wanted(text.decode("utf-8", "replace")), self._reader(one.cpu().numpy())))
            except (ValueError, OSError, subprocess.SubprocessError) as error:
                wrong[row] = str(error)
                scores.append(0.0)
        return answer(torch.tensor(scores, dtype=torch.float32), wrong)


def wanted(prompt: str) -> str:
    """Return the text that a prompt asks for: that in its first pair of quotation marks. Raises ValueError."""
    found = re.search(r'"([^"]+)"', prompt)
    if found is None or not _letters(found[1]):
        raise ValueError('the prompt has nothing between quotation marks, expected such as: a sign that says "open"')
    return found[1]


def match(expected: str, read: str) -> float:
    """Return 1 if the expected text was read, else 1 - min(distance, length) / length, as in Flow-GRPO.

    The distance is Levenshtein's, the length that of the expected text. Whitespace and case are ignored.
    """
    expected, read = _letters(expected), _letters(read)
    if expected in read:
        return 1.0
    return 1.0 - min(_distance(expected, read), len(expected)) / len(expected)


def _letters(text: str) -> str:
    return re.sub(r"\s+", "", text).lower()


def _distance(one: str, other: str) -> int:
    """Return the Levenshtein distance: the number of insertions, deletions and substitutions."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


def tesseract(image: NDArray[np.uint8]) -> str:
    """Return the text that the program tesseract reads. Raises OSError, subprocess.SubprocessError."""
    sink = io.BytesIO()
    Image.fromarray(image).save(sink, "PNG")
    command = ["tesseract", "stdin", "stdout", "--psm", "11"]
    done = subprocess.run(command, input=sink.getvalue(), capture_output=True, timeout=_TIMEOUT, check=True)
    return done.stdout.decode("utf-8", "replace")


def ocr_match(reader: str = "tesseract", pixels: int = _PIXELS) -> ServedModel:
    """Text rendering: whether an image contains the text in quotation marks in its prompt.

    Args:
        reader: "tesseract" for the program, or "module:function" for a function that maps an image, uint8 (height,
            width, 3) RGB, to its text.
        pixels: number of pixels of the largest image.

    Returns:
        Inputs ``image`` uint8 (-1, -1, 3) RGB and ``prompt`` text; output ``score`` float32 (), 0 to 1. If a prompt has
        no quotation marks, or an image cannot be read, only that row fails.

    Raises:
        FileNotFoundError: tesseract is not installed.
        ValueError: reader is neither "tesseract" nor "module:function".
    """
    if reader == "tesseract":
        if shutil.which("tesseract") is None:
            raise FileNotFoundError(
                "the ocr_match juror needs the program tesseract, which is not installed: apt install tesseract-ocr, "
                'or name a function of yours, reader = "module:function"'
            )
        read: Reader = tesseract
    else:
        module, _, name = reader.partition(":")
        if not module or not name:
            raise ValueError(f'reader is {reader!r}: expected "tesseract" or "module:function"')
        read = getattr(importlib.import_module(module), name)
    inputs = {"image": image_input(pixels), "prompt": TensorSpec("bytes", capacity=8192)}
    return ServedModel(_OcrMatch(read), inputs, SCORE)
