"""A small action chunking transformer for the swing-up: the network, its training, and the factory for a server."""

import numpy as np
import torch
import torch.nn.functional as F
from swing_up import STEPS, SwingUp, expert
from torch import nn

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.server.robot_policies import ActNetwork, ActSizes

CHUNK, EXECUTED, MAX_BATCH = 8, 4, 8  # actions of a chunk, and how many of them are executed before the next
SIZES = ActSizes(
    action=1, chunk=CHUNK, state=3, width=64, heads=4, feedforward=128, encoder_layers=2, pre_norm=True, dropout=0.0
)


class Policy(nn.Module):
    """States (n, 3) to chunks of actions (n, 8, 1) in [-1, 1]."""

    def __init__(self):
        super().__init__()
        self.net = ActNetwork(SIZES)  # a robot with cameras: ActNetwork(SIZES, resnet("resnet18"))

    def forward(self, state):
        return torch.tanh(self.net(state))


def act(weights):
    """The factory: the policy with the weights of a file."""
    policy = Policy()
    policy.load_state_dict(torch.load(weights, weights_only=True))
    outputs = {"actions": TensorSpec("float32", (CHUNK, 1), finite=True)}
    return ServedModel(policy.eval(), {"state": TensorSpec("float32", (3,))}, outputs)


def demonstrations(episodes, rng):
    """States and the expert's chunks; executed actions are disturbed, so that the policy also sees recoveries
    (Laskey et al. 2017, "DART")."""
    env, states, chunks = SwingUp(), [], []
    for _ in range(episodes):
        seen, _ = env.reset(seed=int(rng.integers(1 << 30)))
        noise, actions = rng.choice([0.0, 0.05, 0.2]), []
        for step in range(STEPS + CHUNK):
            if step < STEPS:
                states.append(seen["state"])
            actions.append(expert(env))
            seen, *_ = env.step(actions[-1] + noise * rng.normal(size=1))
        chunks += [actions[at : at + CHUNK] for at in range(STEPS)]
    return torch.from_numpy(np.array(states)), torch.from_numpy(np.array(chunks))


def train(episodes, steps, seed=0, log=print):
    """Behaviour cloning with the paper's L1 loss; returns the policy."""
    torch.manual_seed(seed)
    states, chunks = demonstrations(episodes, np.random.default_rng(seed))
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        rows = torch.randint(len(states), (128,))
        loss = F.l1_loss(policy(states[rows]), chunks[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0 or step == steps - 1:
            log(f"step {step}: loss {loss.item():.3f}")
    return policy.eval()
