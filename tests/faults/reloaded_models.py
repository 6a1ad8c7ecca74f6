"""Models whose loads fail or end their engine, and one that forks: factories that a server's config can name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from tests.models import VECTOR, Affine, affine

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel


class Wider(Affine):
    """As Affine, with one more tensor; its first forward does what a file says, in one engine."""

    def __init__(self, orders: str) -> None:
        super().__init__(2.0, 1.0)
        self.more = torch.nn.Parameter(torch.zeros(3))
        self.orders = Path(orders)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if order := self.order():
            if order.endswith("die"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("this file is in the way")
        return super().forward(observation)

    def order(self) -> str:
        """Return what the file says; only one engine takes one that says "once"."""
        try:
            order = self.orders.read_text()
            if order.startswith("once "):
                self.orders.rename(self.orders.with_suffix(f".{os.getpid()}"))
        except FileNotFoundError:  # another engine has taken it
            return ""
        return order


def wider(orders: str) -> ServedModel:
    return ServedModel(Wider(orders), VECTOR, {"action": TensorSpec("float32", (4,))})


def forking(pids: str) -> ServedModel:
    """Forks a process that inherits all descriptors of the engine, and adds its id to a file."""
    if (pid := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    with Path(pids).open("a") as file:
        file.write(f"{pid}\n")
    return affine()
