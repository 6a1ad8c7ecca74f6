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


class Watching(nn.Module):
    """Every action is (the number of frames, the brightness of the last one)."""

    def forward(self, front, joints, prompt):
        rows = [(float(len(frames)), float(frames[-1].float().mean())) for frames in front]
        return torch.tensor(rows)[:, None].expand(-1, HORIZON, -1).contiguous()


def watching():
    """A policy that takes one frame first and several later, as DreamZero's client sends them."""
    return ServedModel(
        Watching(),
        {
            "observation/front": TensorSpec("uint8", (-1, 8, 6, 3), capacity=4 * 8 * 6 * 3),
            "observation/joints": TensorSpec("float32", (7,)),
            "prompt": TensorSpec("bytes", capacity=100),
        },
        {"actions": CHUNK},
    )


class ByPart(nn.Module):
    def forward(self, image, arm, text):
        arms = arm[:, 0, None] + torch.tensor([float(len(words)) for words in text])[:, None, None]
        return arms.expand(-1, HORIZON, -1).contiguous(), image.float().mean(dim=(1, 2, 3, 4))[:, None, None].expand(
            -1, HORIZON, 1
        ).contiguous()


def by_part():
    """A policy with an output for each part of the robot, as GR00T's; rows have no batch axis."""
    return ServedModel(
        ByPart(),
        {
            "video/front": TensorSpec("uint8", (2, 8, 6, 3)),
            "state/arm": TensorSpec("float32", (1, 2)),
            "language/task": TensorSpec("bytes", capacity=100),
        },
        {"arm": CHUNK, "gripper": TensorSpec("float32", (HORIZON, 1))},
    )


class Vla(nn.Module):
    """The action is (mean of the image, length of the instruction, 0, ...); a black image fails its row.

    A batch takes 5 ms.
    """

    def forward(self, image, instruction):
        time.sleep(0.005)
        action = torch.zeros(len(image), 7)
        action[:, 0] = image.float().mean(dim=(1, 2, 3))
        action[:, 1] = torch.tensor([float(len(text)) for text in instruction])
        wrong = {i: "the camera is covered" for i, mean in enumerate(action[:, 0].tolist()) if mean == 0}
        return RowErrors(wrong, action) if wrong else action


def vla():
    """A policy of one action, as OpenVLA's."""
    return ServedModel(
        Vla(),
        {"image": TensorSpec("uint8", (8, 6, 3)), "instruction": TensorSpec("bytes", capacity=100)},
        {"action": TensorSpec("float32", (7,))},
    )


class Oft(nn.Module):
    def forward(self, full_image, state, instruction):
        first = state.sum(dim=1) + full_image.float().mean(dim=(1, 2, 3))
        second = torch.tensor([float(len(text)) for text in instruction])
        return torch.stack([first, second], dim=1)[:, None].expand(-1, HORIZON, -1).contiguous()


def oft():
    """A policy of chunks, with the names of OpenVLA-OFT's observations."""
    return ServedModel(
        Oft(),
        {
            "full_image": TensorSpec("uint8", (8, 6, 3)),
            "state": TensorSpec("float32", (3,)),
            "instruction": TensorSpec("bytes", capacity=100),
        },
        {"actions": CHUNK},
    )


class Stepping(nn.Module):
    def forward(self, arm, total):
        total = total + torch.cat([arm[:, 0], torch.ones(len(arm), 1)], dim=1)
        return total[:, None].expand(-1, HORIZON, -1).contiguous(), total


def stepping():
    """As `counting`, with the names of GR00T's observations."""
    return ServedModel(
        Stepping(),
        {"state/arm": TensorSpec("float32", (1, 1))},
        {"arm": CHUNK},
        state={"total": TensorSpec("float32", (2,))},
    )


class Arm(nn.Module):
    """Every action is (the sum of the motors + the mean of the picture, length of the task); -1 fails its row."""

    def forward(self, state, top, task):
        first = state.sum(dim=1) + top.float().mean(dim=(1, 2, 3))
        second = torch.tensor([float(len(text)) for text in task])
        actions = torch.stack([first, second], dim=1)[:, None].expand(-1, HORIZON, -1).contiguous()
        wrong = {i: "the arm is broken" for i, value in enumerate(state[:, 0].tolist()) if value == -1}
        return RowErrors(wrong, actions) if wrong else actions


def arm():
    """A policy with the names of LeRobot's features."""
    return ServedModel(
        Arm(),
        {
            "observation.state": TensorSpec("float32", (2,)),
            "observation.images.top": TensorSpec("uint8", (8, 6, 3)),
            "task": TensorSpec("bytes", capacity=100),
        },
        {"actions": CHUNK},
    )


class Totals(nn.Module):
    def forward(self, state, total):
        total = total + torch.cat([state[:, :1], torch.ones(len(state), 1)], dim=1)
        return total[:, None].expand(-1, HORIZON, -1).contiguous(), total


def totals():
    """As `counting`, with the names of LeRobot's features: (the sum of the first motor's positions, steps)."""
    return ServedModel(
        Totals(),
        {"observation.state": TensorSpec("float32", (2,))},
        {"actions": CHUNK},
        state={"total": TensorSpec("float32", (2,))},
    )


class Slow(nn.Module):
    def __init__(self, inside, pause):
        super().__init__()
        self.inside, self.pause = inside, pause

    def forward(self, *inputs):
        time.sleep(self.pause)
        return self.inside(*inputs)


def slow(name, pause):
    """Another policy of this file, which takes `pause` seconds for a batch."""
    served = globals()[name]()
    return ServedModel(Slow(served.module, pause), served.inputs, served.outputs)


class Steered(nn.Module):
    """Every action is (the sum of the state times the scale, plus the seed; the length of the task)."""

    def forward(self, state, seed, scale, task):
        first = state.flatten(1).sum(1) * scale + seed
        second = torch.tensor([float(len(text)) for text in task])
        return torch.stack([first, second], dim=1)[:, None].expand(-1, HORIZON, -1).contiguous()


def steered(state="state/arm"):
    return ServedModel(
        Steered(),
        {
            state: TensorSpec("float32", (3,)),
            "seed": TensorSpec("int64"),
            "scale": TensorSpec("float32"),
            "task": TensorSpec("bytes", capacity=20),
        },
        {"actions": CHUNK},
    )
