"""One replay under test, in a process of its own: rows/s of adding and sampling, as JSON.

usage: python contestants.py NAME large|small CAPACITY SECONDS
Runs with the interpreter of the environment in which the library is installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import own
import peers
from measure import SHAPES, Rows


@dataclass(frozen=True)
class Contestant:
    """The program of a contestant, its environment ("": this one), and its rows."""

    run: Callable[..., dict[str, float]]
    environment: str = ""
    sizes: tuple[str, ...] = ("large", "small")


CONTESTANTS = {
    "jurybox": Contestant(own.ours),
    "jurybox, observations as uint8": Contestant(lambda *a: own.ours(*a, stored="uint8"), sizes=("large",)),
    "jurybox, observations as bits": Contestant(lambda *a: own.ours(*a, stored="bits"), sizes=("large",)),
    "jurybox, observations as float16": Contestant(lambda *a: own.ours(*a, stored="float16"), sizes=("large",)),
    "NumPy ring": Contestant(own.numpy_ring),
    "torch index_select, 2 threads": Contestant(own.torch_select),
    "queue drained under an RLock": Contestant(own.drained_queue),
    "shared arrays, locked counters": Contestant(own.locked_counters),
    "SB3": Contestant(peers.sb3),
    "cpprb": Contestant(peers.cpprb, "cpprb"),
    "TorchRL, tensors": Contestant(peers.torchrl, "torchrl"),
    "TorchRL, memmap": Contestant(lambda *a: peers.torchrl(*a, kind="memmap"), "torchrl"),
    "TorchRL, prioritized": Contestant(lambda *a: peers.torchrl(*a, kind="prioritized"), "torchrl"),
    "Reverb": Contestant(peers.reverb, "reverb"),
}

if __name__ == "__main__":
    name, size, capacity, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    print(json.dumps(CONTESTANTS[name].run(SHAPES[size], capacity, Rows(SHAPES[size]), seconds)))
