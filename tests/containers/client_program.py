"""The program in a client's container: sends requests to the photo juror and prints a line of JSON per answer.

It is given to `python -c` as text, so it imports nothing of the tests.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from jurybox.client import Error, connect

PICTURES = 6


def picture(number: int) -> np.ndarray:
    """A picture that every process makes alike: smooth colours, each with its own direction, and some grain."""
    x, y = np.meshgrid(np.linspace(0, 1, 384), np.linspace(0, 1, 384))
    waves = [np.sin((number + 2) * x * scale + y * (5 - number)) for scale in (1, 2, 3)]
    grain = np.random.default_rng(number).normal(0, 4, (384, 384, 3))
    return (127 + 100 * np.stack(waves, axis=2) + grain).clip(0, 255).astype(np.uint8)


def ask_for(seconds: float) -> None:
    pictures = [picture(number) for number in range(PICTURES)]
    until, server, number = time.monotonic() + seconds, None, 0
    while time.monotonic() < until:
        try:
            server = server or connect(timeout=5.0)
            juror = server.model("photo", timeout=5.0)
            while time.monotonic() < until:
                which = number % PICTURES
                say(picture=which, score=float(juror(pictures[which], timeout=120.0)["score"]))
                number += 1
                time.sleep(0.02)
        except Error as error:
            say(error=type(error).__name__, text=str(error))
            time.sleep(0.2)
    if server is not None:
        server.close()


def say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    ask_for(float(sys.argv[1]))
