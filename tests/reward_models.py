"""Jurors for tests of rewards: each score can be checked against its row, and contains the batch size."""

from __future__ import annotations

import json
import os
import signal
import time

import torch
from torch import nn

from jurybox.protocol import TensorSpec
from jurybox.server.models import RowErrors, ServedModel

IMAGE = TensorSpec("uint8", (-1, -1, 3), capacity=3 * 256 * 256)
TEXT = TensorSpec("bytes", capacity=2000)
OUTPUTS = {"score": TensorSpec("float32"), "batch": TensorSpec("float32")}


class TextLength(nn.Module):
    """The length of each text in bytes; "bad" fails, "nan" is NaN, "breaks" raises, "dies" kills the engine.

    "slow" takes a second, in which others come together.
    """

    def forward(self, text):
        time.sleep(1.0 if any(b"slow" in row for row in text) else 0.002)
        if any(b"dies" in row for row in text):
            os.kill(os.getpid(), signal.SIGKILL)
        if any(b"breaks" in row for row in text):
            raise RuntimeError("this text breaks the model")
        scores = torch.tensor([float("nan") if b"nan" in row else float(len(row)) for row in text])
        outputs = {"score": scores, "batch": torch.full_like(scores, len(text))}
        wrong = {i: "a bad text" for i, row in enumerate(text) if b"bad" in row}
        return RowErrors(wrong, outputs) if wrong else outputs


def text_length():
    return ServedModel(TextLength(), {"text": TEXT}, OUTPUTS)


class Pair(nn.Module):
    """A hundred for each byte of the query, one for each of the document."""

    def forward(self, query, document):
        return torch.tensor([100.0 * len(a) + len(b) for a, b in zip(query, document, strict=True)])


def pair():
    return ServedModel(Pair(), {"query": TEXT, "document": TEXT}, {"score": TensorSpec("float32")})


class Brightness(nn.Module):
    """The mean of each picture, 0 to 1; NaN of a white one; a black one fails."""

    def forward(self, image, prompt=None):
        mean = torch.stack([one.float().mean() / 255 for one in image])
        scores = torch.where(mean == 1, torch.nan, mean)
        if prompt is not None:
            scores = scores + torch.tensor([float(len(row)) for row in prompt])
        outputs = {"score": scores, "batch": torch.full_like(scores, len(image))}
        wrong = {i: "a black picture" for i, value in enumerate(mean.tolist()) if value == 0}
        return RowErrors(wrong, outputs) if wrong else outputs


def brightness():
    return ServedModel(Brightness(), {"image": IMAGE}, OUTPUTS)


class Changed(nn.Module):
    """How much brighter a picture is than its source."""

    def forward(self, image, source):
        mean = torch.stack([(a.float().mean() - b.float().mean()) / 255 for a, b in zip(image, source, strict=True)])
        return {"score": mean, "batch": torch.full_like(mean, len(image))}


def changed():
    return ServedModel(Changed(), {"image": IMAGE, "source": IMAGE}, OUTPUTS)


class Frames(nn.Module):
    """The number of frames, and their mean brightness behind the point."""

    def forward(self, video):
        score = torch.stack([len(one) + one.float().mean() / 255 for one in video])
        return {"score": score, "batch": torch.full_like(score, len(video))}


def frames():
    return ServedModel(Frames(), {"video": TensorSpec("uint8", (-1, -1, -1, 3), capacity=3 * 128 * 128 * 4)}, OUTPUTS)


class Progress(nn.Module):
    """The mean brightness of a film, 0 to 1; half of it more for a white one; a black one fails."""

    def forward(self, video):
        mean = torch.stack([one.float().mean() / 255 for one in video])
        outputs = {"score": torch.where(mean == 1, 1.5, mean), "batch": torch.full_like(mean, len(video))}
        wrong = {i: "a black film" for i, value in enumerate(mean.tolist()) if value == 0}
        return RowErrors(wrong, outputs) if wrong else outputs


def progress():
    return ServedModel(Progress(), {"video": TensorSpec("uint8", (-1, -1, -1, 3), capacity=3 * 128 * 128 * 4)}, OUTPUTS)


def large_brightness():
    """Of pictures of 512 x 512."""
    return ServedModel(Brightness(), {"image": TensorSpec("uint8", (512, 512, 3))}, OUTPUTS)


def brightness_and_prompt():
    """The same, plus the length of the prompt in bytes."""
    return ServedModel(Brightness(), {"image": IMAGE, "prompt": TEXT}, OUTPUTS)


class Judged(nn.Module):
    """As GenEval: the brightness, whether it is above a third, and above a half; the metadata's count is added."""

    def forward(self, image, metadata):
        mean = torch.stack([one.float().mean() / 255 for one in image])
        told = [json.loads(row) if row.startswith(b"{") else {"include": [{"count": 0}]} for row in metadata]
        counts = torch.tensor([float(one["include"][0]["count"]) for one in told])
        return {"graded": mean + counts, "right": (mean > 1 / 3).float(), "strict": (mean > 1 / 2).float()}


def judged():
    numbers = {name: TensorSpec("float32") for name in ("graded", "right", "strict")}
    return ServedModel(Judged(), {"image": IMAGE, "metadata": TEXT}, numbers)


class Scaled(nn.Module):
    """The length of each text times the scale, plus the seed."""

    def forward(self, text, scale, seed):
        return torch.tensor([float(len(row)) for row in text]) * scale + seed


def scaled():
    inputs = {"text": TEXT, "scale": TensorSpec("float32"), "seed": TensorSpec("int32")}
    return ServedModel(Scaled(), inputs, {"score": TensorSpec("float32")})
