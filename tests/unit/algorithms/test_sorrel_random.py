"""A resumed sorrel role draws the random numbers that it would have drawn. A stand-in takes the place of sorrel."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import torch

from jurybox.training.checkpoints import read_state, write_state
from jurybox.training.sorrel.roles import SorrelActor

DRAWN = []


class World:
    """Draws from all global generators, as sorrel's worlds, agents and models do."""

    def __init__(self):
        self.agents, self.turn, self.stop_if_done = [], 0, False
        self.config = SimpleNamespace(experiment=SimpleNamespace(max_turns=2))
        self.world = SimpleNamespace(is_done=False, total_reward=0.0)

    def reset(self):
        self.turn = 0

    def take_turn(self, epoch):
        self.turn += 1
        DRAWN.append((epoch, random.random(), float(np.random.standard_normal()), float(torch.rand(()))))


def actor():
    context = SimpleNamespace(seed=5, spec=SimpleNamespace(threads=torch.get_num_threads()), episode=lambda **_: None)
    return SorrelActor(context, make=(f"{__name__}:World", {}), groups={})


def test_a_resumed_actor_draws_what_it_would_have_drawn(tmp_path):
    DRAWN.clear()
    first = actor()
    for _ in range(4):
        first.step()
    write_state(tmp_path / "actor.state", first.save())
    for _ in range(4):
        first.step()
    resumed = actor()
    resumed.restore(read_state(tmp_path / "actor.state"))
    for _ in range(4):
        resumed.step()
    assert DRAWN[8:] == DRAWN[4:8] and DRAWN[:4] != DRAWN[4:8]
