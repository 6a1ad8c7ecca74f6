"""Policies of robots for tests: their answers contain what they received."""

from __future__ import annotations

import time

import torch
from torch import nn

from jurybox.protocol import TensorSpec
from jurybox.server.models import RowErrors, ServedModel

HORIZON, DIMENSION = 5, 2
CHUNK = TensorSpec("float32", (HORIZON, DIMENSION))


class Seen(nn.Module):
    """Every action is (sum of the state + mean of the image, length of the prompt); a state of -1 fails its row."""

    def forward(self, image, state, prompt):
        first = state.sum(dim=1) + image.float().mean(dim=(1, 2, 3))
        second = torch.tensor([float(len(text)) for text in prompt])
        actions = torch.stack([first, second], dim=1)[:, None].expand(-1, HORIZON, -1).contiguous()
        wrong = {i: "the arm is broken" for i, value in enumerate(state[:, 0].tolist()) if value == -1}
        return RowErrors(wrong, actions) if wrong else actions


def seen():
    return ServedModel(
        Seen(),
        {
            "observation/image": TensorSpec("uint8", (8, 6, 3)),
            "observation/state": TensorSpec("float32", (3,)),
            "prompt": TensorSpec("bytes", capacity=100),
        },
        {"actions": CHUNK},
    )


class Counting(nn.Module):
    """Every action is (the sum of an episode's states, its steps). A state of 1000 takes a second and a half."""

    def forward(self, state, total):
        if float(state.max()) >= 1000:
            time.sleep(1.5)
        total = total + torch.cat([state, torch.ones_like(state)], dim=1)
        return total[:, None].expand(-1, HORIZON, -1).contiguous(), total


def counting():
    return ServedModel(
        Counting(),
        {"state": TensorSpec("float32", (1,))},
        {"chunk": CHUNK},
        state={"total": TensorSpec("float32", (2,))},
    )
