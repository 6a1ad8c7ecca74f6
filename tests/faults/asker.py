"""A client process that sends requests without a break, checks every answer, and prints the results at its end.

python -m tests.faults.asker ADDRESS TRANSPORT [JOURNAL]

TRANSPORT is as `connect` has it, or "web": HTTP with binary tensors over one connection, as long as it is open.

It uses in turn those of the models affine (rows of one shape), shout (texts) and sum (sessions) that the server has.

A journal gets three float64 a call: when it began and ended (s of CLOCK_MONOTONIC), and 1 for a right answer, 0 for an
error, -1 for a wrong answer. Wrong answers are printed at the end, and written to `JOURNAL.wrong`.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jurybox.client import Error, Server, ServerGone, SessionLost, connect
from jurybox.client.remote import connection
from jurybox.protocol.errors import Code

TIMEOUT = 60.0  # seconds for one answer: whatever is done to the server, it is back before
CALL = struct.Struct("3d")  # of a journal


_wrong: list[str] = []  # what was asked, what came, what was expected


def same(got: Any, expected: Any, asked: object) -> bool:
    """Return whether an answer is the expected one; if not, keep it and its request."""
    right = np.array_equal(got, expected)
    if not right:
        got, expected = (value.tolist() if isinstance(value, np.ndarray) else value for value in (got, expected))
        _wrong.append(f"{time.monotonic():.3f} asked {asked}, expected {expected}, got {got}")
    return right


def keep_wrong(journal: BinaryIO) -> None:
    """Write the last wrong answer beside the journal."""
    with Path(f"{journal.name}.wrong").open("a") as file:
        file.write(f"{_wrong[-1]}\n")


@dataclass(frozen=True)
class Told:
    """The results of an asker: answers, wrong ones, errors as text, the longest wait in seconds."""

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
        out, _ = self.process.communicate(timeout=2 * TIMEOUT)
        return Told(**json.loads(out))


def affine(server: Server, rng: np.random.Generator) -> Callable[[], bool]:
    model = server.model("affine", rows=8)

    def right() -> bool:
        x = rng.standard_normal((int(rng.integers(1, 9)), 4)).astype(np.float32)
        return same(model.infer(x), 2 * x + 1, "affine")

    return right


def shout(server: Server, rng: np.random.Generator) -> Callable[[], bool]:
    model = server.model("shout", rows=4)

    def right() -> bool:
        texts = [bytes(rng.integers(97, 123, rng.integers(0, 400), np.uint8)) for _ in range(rng.integers(1, 5))]
        return same(list(model.infer(texts)), [text.upper() for text in texts], "shout")

    return right


def sums(server: Server, rng: np.random.Generator) -> Callable[[], bool]:
    """A session's answers are right if they come from its own state, and no step is missing."""
    sessions, total = server.model("sum", rows=1).sessions(4), np.zeros(4)

    def right() -> bool:
        ids = rng.permutation(4)[: rng.integers(1, 5)]
        x, reset = rng.integers(0, 100, (len(ids), 1)).astype(np.float32), rng.random(len(ids)) < 0.02
        while True:
            try:
                y = sessions.infer(x, ids, reset)
                break
            except SessionLost as lost:  # with an engine or a connection, or what an error left unknown
                reset |= np.isin(ids, lost.sessions)
        total[ids] = np.where(reset, 0, total[ids]) + x[:, 0]
        return same(y, total[ids], f"sum {ids} {reset}")

    return right


class Web:
    """Requests over HTTP with the same heads and forms, so that the path for known forms answers them.

    There is no Jurybox client for HTTP: requests that are cut off or refused are repeated for TIMEOUT.
    """

    def __init__(self, address: str, rng: np.random.Generator) -> None:
        self.where = address.removeprefix("http://")
        self.rng = rng
        self.line: http.client.HTTPConnection | None = None
        self.version = 0

    def affine(self) -> bool:
        x = self.rng.standard_normal((int(self.rng.integers(1, 9)), 4)).astype(np.float32)
        y = self.infer("affine", "observation", "FP32", x.shape, x.tobytes())
        return same(y, 2 * x.reshape(-1) + 1, f"affine {x.shape}, version {self.version}")

    def policy(self) -> bool:
        """Its weights change all the time: an answer is of the version that it names."""
        x = self.rng.integers(1, 100, (2, 4)).astype(np.float32)
        y = self.infer("policy", "observation", "FP32", x.shape, x.tobytes())
        scale, offset = (self.version, self.version) if self.version else (2, 1)
        return same(y, scale * x.reshape(-1) + offset, f"policy {x.tolist()}, version {self.version}")

    def infer(self, model: str, name: str, datatype: str, shape: tuple[int, ...], raw: bytes) -> np.ndarray:
        tensor = {"name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(raw)}}
        text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        headers = {"Inference-Header-Content-Length": str(len(text))}
        until, why = time.monotonic() + TIMEOUT, "?"
        while time.monotonic() < until:
            try:
                if self.line is None:
                    self.line = http.client.HTTPConnection(self.where, timeout=TIMEOUT)
                self.line.request("POST", f"/v2/models/{model}/infer", text + raw, headers)
                answer = self.line.getresponse()
                body = answer.read()
            except (OSError, http.client.HTTPException) as error:
                self.line, why = None, f"{type(error).__name__}: {error}"
                time.sleep(0.05)
                continue
            if answer.status == 200:
                size = int(answer.headers["Inference-Header-Content-Length"])
                self.version = int(json.loads(body[:size])["model_version"])
                return np.frombuffer(body[size:], np.float32)
            why = f"{answer.status} {body[:200]!r}"
            if answer.status not in (429, 503, 504):
                break
            time.sleep(0.05)
        raise Error(why)


def asked(question: Callable[[], bool], *, again: bool) -> bool:
    """The outcome of a request.

    Over gRPC a server is given up after some seconds, and one that is loading returns an error: then the request is
    repeated (`again`) for TIMEOUT.
    """
    until = time.monotonic() + TIMEOUT
    while True:
        try:
            return question()
        except Error as error:
            away = isinstance(error, ServerGone) or error.code in (Code.NOT_READY, Code.BUSY)
            if not (again and away) or time.monotonic() > until:
                raise
            time.sleep(0.05)


def ask(address: str, transport: str, journal: BinaryIO | None) -> Told:
    connection._TIMEOUT = TIMEOUT  # a relay's successor may take long to start where others want the cores too
    rng = np.random.default_rng()
    answered, wrong, errors, longest = 0, 0, [], 0.0
    with contextlib.ExitStack() as stack:
        if transport == "web":
            web = Web(address, rng)
            questions = [web.affine, web.policy]
        else:
            server = stack.enter_context(connect(address, transport=transport, timeout=TIMEOUT))
            there = server.models()
            kinds = {"affine": affine, "shout": shout, "sum": sums}
            questions = [kind(server, rng) for name, kind in kinds.items() if name in there]
        for question in itertools.cycle(questions):
            if select.select([sys.stdin], [], [], 0)[0]:
                break
            began = time.monotonic()
            outcome = 0.0
            try:
                outcome = 1.0 if asked(question, again=address.startswith("grpc://")) else -1.0
                if outcome < 0:
                    wrong += 1
                    if journal is not None:
                        keep_wrong(journal)
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
            time.sleep(0.002 if journal is None else 0.02)  # other clients must get their share
    return Told(answered, wrong, errors, longest)


if __name__ == "__main__":
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(Path(sys.argv[3]).open("ab")) if sys.argv[3:] else None
        told = ask(sys.argv[1], sys.argv[2], journal)
    print(json.dumps(vars(told)), flush=True)
