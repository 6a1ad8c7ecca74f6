"""An LSTM policy whose memory stays on the server, a session for each environment.

Only the first observation shows the direction to turn at the end of a corridor.
"""

import argparse

import numpy as np
import torch
from torch import nn

from jurybox.client import connect
from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.training.runtime import served_models

ENVS, LENGTH, HIDDEN = 32, 10, 32


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(2, HIDDEN), nn.Linear(HIDDEN, 2)

    def forward(self, observation, hidden, cell):
        hidden, cell = self.cell(observation, (hidden, cell))
        return self.head(hidden), hidden, cell  # the output, then the next state


def policy() -> ServedModel:
    state = {"hidden": TensorSpec("float32", (HIDDEN,)), "cell": TensorSpec("float32", (HIDDEN,))}
    inputs, outputs = {"observation": TensorSpec("float32", (2,))}, {"logits": TensorSpec("float32", (2,))}
    return ServedModel(Memory(), inputs, outputs, state=state)


def corridors(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The right turns, and the observations: the turn (-1, 1) in the first step, then 0; and the position."""
    turn, seen = rng.integers(2, size=ENVS), np.zeros((LENGTH, ENVS, 2), np.float32)
    seen[0, :, 0], seen[:, :, 1] = 2 * turn - 1, np.linspace(0, 1, LENGTH)[:, None]
    return turn, seen


def main(updates: int, address: str | None) -> None:
    torch.manual_seed(0)
    rng, net, right = np.random.default_rng(0), policy().module, []
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    models = {"policy": {"factory": "lstm_sessions:policy", "publish": "double_buffer", "rows": 4 * ENVS}}
    with served_models(models, address) as served, connect(served.address) as server:
        model, publisher = server.model(served.names["policy"], rows=ENVS), server.publisher(served.names["policy"])
        with model.sessions(ENVS) as sessions:
            for _ in range(updates):
                publisher.publish(net)
                turn, seen = corridors(rng)
                for t in range(LENGTH):
                    logits = sessions.infer(seen[t], reset=np.full(ENVS, t == 0))
                action = (logits + rng.gumbel(size=(ENVS, 2))).argmax(1)
                reward = torch.from_numpy((action == turn).astype(np.float32))
                right.append(reward.mean().item())
                state = torch.zeros(2, ENVS, HIDDEN)
                for t in range(LENGTH):
                    logits, *state = net(torch.from_numpy(seen[t]), *state)
                chosen = logits.log_softmax(1)[range(ENVS), action]
                optimizer.zero_grad()
                (-chosen * (reward - 0.5)).mean().backward()
                optimizer.step()
            turn, seen = corridors(rng)
            for t in range(LENGTH):
                forgetful = sessions.infer(seen[t], reset=np.ones(ENVS, bool)).argmax(1)
    print(f"right turns: first 10 updates {np.mean(right[:10]):.0%}, last 10 updates {np.mean(right[-10:]):.0%}")
    print(f"the same policy, made to forget at every step: {(forgetful == turn).mean():.0%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--server", help="address of one that runs; without it a private one is started")
    arguments = parser.parse_args()
    main(arguments.updates, arguments.server)
