"""Models whose rows differ in size, fail alone, or have state, for tests."""

from __future__ import annotations

import torch
from torch import nn

from jurybox.protocol import TensorSpec
from jurybox.server.models import RowErrors, ServedModel

IMAGE = TensorSpec("uint8", (-1, -1, 3), capacity=3072)
TEXT = TensorSpec("bytes", capacity=400)
NUMBER = TensorSpec("float32", ())


class Brightness(nn.Module):
    """The mean of each image, 0 to 1."""

    def forward(self, image, image_lengths=None):
        if image_lengths is None:
            return torch.stack([one.float().mean() / 255 for one in image])
        return image.float().sum(dim=(1, 2, 3)) / (3 * image_lengths.prod(dim=1) * 255)


def brightness(collate="list"):
    return ServedModel(Brightness(), {"image": IMAGE}, {"score": NUMBER}, collate=collate)


class Shout(nn.Module):
    def forward(self, text):
        return [row.decode().upper() for row in text]


def shout():
    return ServedModel(Shout(), {"text": TEXT}, {"text": TEXT})


class Prompted(nn.Module):
    def forward(self, image, prompt):
        size = torch.tensor([one.shape[0] * one.shape[1] for one in image], dtype=torch.float32)
        return size, torch.tensor([len(row) for row in prompt], dtype=torch.float32)


def prompted():
    return ServedModel(Prompted(), {"image": IMAGE, "prompt": TEXT}, {"size": NUMBER, "words": NUMBER})


class Threshold(nn.Module):
    def forward(self, image):
        return [one.float().mean(dim=2) > 127 for one in image]


def threshold():
    return ServedModel(Threshold(), {"image": IMAGE}, {"mask": TensorSpec("bool", (-1, -1), capacity=1024)})


class Waves(nn.Module):
    def forward(self, x):
        return torch.stack([one.sum() for one in x])


def waves():
    return ServedModel(Waves(), {"x": TensorSpec("float32", (-1,), capacity=16)}, {"y": NUMBER})


class Picky(nn.Module):
    """Twice the number; threes and sixes fail."""

    def forward(self, x):
        wrong = {i: {3: "three", 6: "six"}[int(v)] for i, v in enumerate(x[:, 0].tolist()) if v in (3, 6)}
        return RowErrors(wrong, 2 * x[:, 0]) if wrong else 2 * x[:, 0]


def picky():
    return ServedModel(Picky(), {"x": TensorSpec("float32", (1,))}, {"y": NUMBER})


class Reciprocal(nn.Module):
    def forward(self, x):
        return 1 / x[:, 0]


def reciprocal():
    return ServedModel(Reciprocal(), {"x": TensorSpec("float32", (1,))}, {"y": TensorSpec("float32", finite=True)})


class Recorded(nn.Module):
    """Lengths; each batch's size is noted."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def forward(self, text, text_lengths):
        self.seen.append(tuple(text.shape))
        return text_lengths.float()


def recorded(seen, **settings):
    return ServedModel(Recorded(seen), {"text": TEXT}, {"n": NUMBER}, collate="pad", **settings)


class RunningSum(nn.Module):
    """What a session was given so far, added up; a negative number fails the batch."""

    def forward(self, x, total):
        if (x < 0).any():
            raise ValueError("negative")
        total = total + x[:, 0]
        return total, total


def running_sum():
    return ServedModel(RunningSum(), {"x": TensorSpec("float32", (1,))}, {"y": NUMBER}, state={"total": NUMBER})


class Lstm(nn.Module):
    def __init__(self, inputs, hidden, outputs):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(inputs, hidden), nn.Linear(hidden, outputs)

    def forward(self, observation, hidden, cell):
        hidden, cell = self.cell(observation, (hidden, cell))
        return self.head(hidden), hidden, cell


def lstm(inputs=4, hidden=16, outputs=3, seed=0):
    torch.manual_seed(seed)
    state = {"hidden": TensorSpec("float32", (hidden,)), "cell": TensorSpec("float32", (hidden,))}
    return ServedModel(
        Lstm(inputs, hidden, outputs),
        {"observation": TensorSpec("float32", (inputs,))},
        {"logits": TensorSpec("float32", (outputs,))},
        state=state,
    )


def mlp(inputs=52, hidden=256, outputs=145, seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
    return ServedModel(
        net, {"observation": TensorSpec("float32", (inputs,))}, {"logits": TensorSpec("float32", (outputs,))}
    )
