"""A client process that asks without a break and checks every answer; its results are told when its input ends.

python -m tests.faults.asker ADDRESS TRANSPORT [JOURNAL]

A journal gets three float64 a call: when it began and ended (s of CLOCK_MONOTONIC), and 1 for a right answer, 0 for an
error, -1 for a wrong answer.
"""

from __future__ import annotations

import contextlib
import json
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jurybox.client import Error, connect
from jurybox.client.remote import connection

PATIENCE = 60.0  # seconds for one answer: whatever is done to the server, it is back before
CALL = struct.Struct("3d")  # of a journal


@dataclass(frozen=True)
class Told:
    """What an asker says at its end: answers, wrong ones, errors as text, the longest wait in seconds."""

    answered: int
    wrong: int
    errors: list[str]
    longest: float


class Asker:
    """A started asker."""

    def __init__(self, address: str, transport: str, *journal: Path) -> None:
        command = [sys.executable, "-m", "tests.faults.asker", address, transport, *map(str, journal)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ready(self) -> None:
        assert self.process.stdout.readline() == "asking\n"

    def end(self) -> Told:
        out, _ = self.process.communicate(timeout=2 * PATIENCE)
        return Told(**json.loads(out))


def ask(address: str, transport: str, journal: BinaryIO | None) -> Told:
    connection._PATIENCE = PATIENCE  # a relay's successor may take long to start where others want the cores too
    rng = np.random.default_rng()
    answered, wrong, errors, longest = 0, 0, [], 0.0
    with connect(address, transport=transport, timeout=PATIENCE) as server:
        model = server.model("affine", rows=8)
        while not select.select([sys.stdin], [], [], 0)[0]:
            x = rng.standard_normal((int(rng.integers(1, 9)), 4)).astype(np.float32)
            began = time.monotonic()
            outcome = 0.0
            try:
                outcome = 1.0 if np.array_equal(model.infer(x), 2 * x + 1) else -1.0
                wrong += outcome < 0
                answered += 1
            except Error as error:
                errors.append(f"{type(error).__name__}: {error}")
            ended = time.monotonic()
            longest = max(longest, ended - began)
            if journal is not None:
                journal.write(CALL.pack(began, ended, outcome))
                journal.flush()
            if answered == 1:
                print("asking", flush=True)
            time.sleep(0.002 if journal is None else 0.02)  # with others around it, who shall get their share
    return Told(answered, wrong, errors, longest)


if __name__ == "__main__":
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(Path(sys.argv[3]).open("ab")) if sys.argv[3:] else None
        told = ask(sys.argv[1], sys.argv[2], journal)
    print(json.dumps(vars(told)), flush=True)
