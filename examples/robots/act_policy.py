"""A small action chunking transformer for the swing-up: what is learned, how, and the factory a server calls."""

import numpy as np
import torch
import torch.nn.functional as F
from swing_up import SIDE, STEPS, SwingUp, expert
from torch import nn

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.server.robot_policies import ActNetwork, ActSizes

CHUNK, EXECUTED, MAX_BATCH = 8, 4, 8  # actions of a chunk, and how many of them are executed before the next
SIZES = ActSizes(
    action=1, chunk=CHUNK, state=1, width=64, heads=4, feedforward=128, encoder_layers=2, pre_norm=True, dropout=0.0
)


class Policy(nn.Module):
    """Pictures uint8 (n, 32, 32, 3) and states (n, 1) to chunks of actions (n, 8, 1) in [-1, 1]."""

    def __init__(self):
        super().__init__()
        layers, before = [], 3
        for channels in (16, 32, 64):
            layers += [nn.Conv2d(before, channels, 3, stride=2, padding=1), nn.ReLU()]
            before = channels
        self.net = ActNetwork(SIZES, nn.Sequential(*layers), channels=64)

    def forward(self, image, state):
        pixels = image.permute(0, 3, 1, 2).float() / 127.5 - 1
        return torch.tanh(self.net(state, images=[pixels]))


def act(weights):
    """The factory: the policy with the weights of a file."""
    policy = Policy()
    policy.load_state_dict(torch.load(weights, weights_only=True))
    inputs = {"image": TensorSpec("uint8", (SIDE, SIDE, 3)), "state": TensorSpec("float32", (1,))}
    return ServedModel(policy.eval(), inputs, {"actions": TensorSpec("float32", (CHUNK, 1), finite=True)})


def demonstrations(episodes, rng):
    """Pictures, states and the chunks that the expert would have executed; what is executed is disturbed, so that the
    policy sees how one comes back (Laskey et al. 2017, "DART")."""
    env, images, states, chunks = SwingUp(), [], [], []
    for _ in range(episodes):
        seen, _ = env.reset(seed=int(rng.integers(1 << 30)))
        noise, actions = rng.choice([0.0, 0.05, 0.2]), []
        for _ in range(STEPS + CHUNK):
            images.append(seen["image"])
            states.append(seen["state"])
            actions.append(expert(env))
            seen, *_ = env.step(actions[-1] + noise * rng.normal(size=1))
        del images[-CHUNK:], states[-CHUNK:]
        chunks += [actions[at : at + CHUNK] for at in range(STEPS)]
    return tuple(torch.from_numpy(np.array(part, kind)) for part, kind in (
        (images, np.uint8), (states, np.float32), (chunks, np.float32)))  # fmt: skip


def train(episodes, steps, seed=0, log=print):
    """Behaviour cloning with the paper's L1 loss; returns the policy."""
    torch.manual_seed(seed)
    images, states, chunks = demonstrations(episodes, np.random.default_rng(seed))
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        rows = torch.randint(len(images), (64,))
        loss = F.l1_loss(policy(images[rows], states[rows]), chunks[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0 or step == steps - 1:
            log(f"step {step}: loss {loss.item():.3f}")
    return policy.eval()
