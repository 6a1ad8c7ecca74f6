"""An engine whose clock and clients are played: they ask at given times, and batches take as long as a test says."""

from __future__ import annotations

import math

import numpy as np
import torch
from tests.models import VECTOR

from jurybox.protocol.arena import Arena, ArenaLayout
from jurybox.protocol.scoreboard import Scoreboard
from jurybox.protocol.segment import segment_name
from jurybox.protocol.spec import ModelSpec
from jurybox.protocol.wire import PACK_TICKET, TICKET
from jurybox.server.engine.core import Engine
from jurybox.server.engine.device import DeviceServed
from jurybox.server.engine.served import Served
from jurybox.server.models import ServedModel

BATCH = 100_000  # ns


class World:
    """An engine with a simulated clock, and clients that send requests at given times."""

    number = 0
    slow = False

    def __init__(self, think, fixed=BATCH, by_row=0, most=64):
        self.fixed, self.by_row = fixed, by_row
        self.now, self.pauses, self.sizes, self.think = 1_000_000, [], [], think
        self.asks = dict.fromkeys(range(len(think)), self.now)
        owner = Scoreboard.create(segment_name("arrivalstest", "scoreboard"), 1, 0.0)
        self.scoreboard = owner
        spec = ServedModel(torch.nn.Identity(), VECTOR, {"action": VECTOR["observation"]})
        layout = ArenaLayout(ModelSpec("m", spec.inputs, spec.outputs), 64)
        self.arena = Arena.create(segment_name("arrivalstest", "arena"), layout)
        for lane in range(len(think)):
            self.scoreboard.lanes[lane : lane + 1][["lease", "model", "first", "rows"]] = (lane + 1, 0, lane, 1)
        self.engine = Engine(owner, 0, [self], clock=lambda: self.now, pause=self.pause)
        served = Served("m", spec, self.arena.inputs, self.arena.outputs, most)
        served.run = lambda tickets, rows, version: self.forward(rows)
        self.engine.install(0, served)

    def serve_another_model(self):
        """Nobody asks it."""
        spec = ServedModel(torch.nn.Identity(), VECTOR, {"action": VECTOR["observation"]})
        self.engine.install(1, Served("other", spec, self.arena.inputs, self.arena.outputs, 64))

    def pause(self, seconds, more):
        self.pauses.append(seconds)
        coming = sorted(self.asks.values())
        enough = max(coming[more - 1], self.now) if more <= len(coming) else math.inf
        self.now = min(self.now + max(1, int(seconds * 1e9)), enough)

    def forward(self, rows):
        self.sizes.append(rows)
        self.now += self.fixed + self.by_row * rows

    def collect(self, out):
        due = sorted(lane for lane, at in self.asks.items() if at <= self.now)
        for i, lane in enumerate(due):
            asked = self.asks.pop(lane)
            record = PACK_TICKET.pack(asked, lane + 1, 0, asked, lane, lane, 1, 0, 0, 0)
            out[i] = np.frombuffer(record, TICKET)[0]
        return len(due)

    def reply(self, tickets, code, version, message):
        for lane in tickets["lane"].tolist():
            self.asks[lane] = self.now + self.think[lane]

    def run(self, turns):
        for _ in range(turns):
            if not self.engine.turn():
                self.now = max(self.now, min(self.asks.values()))

    def close(self):
        self.arena.close()
        self.scoreboard.close()


class OnDevice(DeviceServed):
    """A model on a device that computes one batch after another while the engine goes on."""

    def __init__(self, world, *given):
        super().__init__(*given)
        self.world, self.free = world, 0

    def begin(self, tickets, rows, version):
        world = self.world
        world.sizes.append(rows)
        self.free = end = max(self.free, world.now) + world.fixed + world.by_row * rows
        world.now += 20_000  # launches
        return Flight(world, end)


class Flight:
    def __init__(self, world, end):
        self.world, self.end = world, end

    def done(self):
        self.world.now += 25_000  # of a turn that finds it under way
        return self.world.now >= self.end

    def finish(self):
        self.world.now = max(self.world.now, self.end)


class DeviceWorld(World):
    """The same with the model on a device."""

    def __init__(self, think, fixed=BATCH, by_row=0):
        super().__init__(think, fixed, by_row)
        spec = ServedModel(torch.nn.Identity(), VECTOR, {"action": VECTOR["observation"]})
        memory = np.zeros(1, np.uint8)
        given = "m", spec, self.arena.inputs, self.arena.outputs, memory, 64, torch.device("cpu")
        self.engine.install(0, OnDevice(self, *given))
