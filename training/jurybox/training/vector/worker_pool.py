"""The worker processes of a vector environment: start, messages, replacement."""

from __future__ import annotations

import itertools
import os
import pickle
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
from gymnasium.vector import AutoresetMode

from jurybox.processes import set_timeouts
from jurybox.protocol.errors import Refused, Timeout
from jurybox.protocol.segment import Segment
from jurybox.training import interrupts
from jurybox.training.vector.layout import InfoFields
from jurybox.training.vector.worker import (
    DONE,
    RAISED,
    THREAD_LIMITS,
    VALUE,
    WorkerConfig,
    WorkerFailed,
    call_message,
    content_of,
    number_of,
    read_done,
)

# Not -m: what a module run as __main__ defines cannot be unpickled here.
_RUN = "from jurybox.training.vector.worker import main; main()"

STOP = 2.0  # seconds that workers get to close their environments
_STARTING_ON_A_CORE = 8  # workers that import and make their environments at a time
_CHECK_SECONDS = 0.5  # between two looks for Ctrl-C while workers start
_MESSAGE_TIMEOUT = 60.0  # seconds for one message, once it has begun; a worker that takes longer counts as gone


class WorkerProcess:
    """One worker; `start`, `handshake` and `share` bring it up, in this order.

    Attributes:
        numbers: of the environments that it holds.
        busy_since: when it was last heard of or given work while it has some; None while it has none.

    Args:
        timeout: seconds that one message may take, once it has begun.
    """

    def __init__(self, index: int, numbers: range, config: WorkerConfig, timeout: float = _MESSAGE_TIMEOUT) -> None:
        self.index = index
        self.numbers = numbers
        self._timeout = timeout
        self.busy_since: float | None = None
        self._config = config
        self._torn = False  # whether Ctrl-C came within a message: its rest would be taken for the next one
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def start(self) -> None:
        self._torn = False
        parent_end, child_end = socket.socketpair()
        set_timeouts(parent_end, self._timeout)
        with child_end, interrupts.blocked_for_children():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _RUN, str(child_end.fileno()), str(os.getpid())],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **THREAD_LIMITS},
            )
            self._pipe = Connection(parent_end.detach())
        self._pipe.send(self._config)

    def handshake(self, timeout: float = 0.0) -> list[tuple[Any, Any, Any]]:
        """Spaces and metadata of its environments.

        Raises:
            WorkerFailed: an environment could not be made, or the process ended.
            Timeout: they are not made within `timeout` seconds.
        """
        if not self.pipe.poll(timeout):
            raise Timeout(
                f"worker {self.index} has not made its environments within {timeout:g} s; raise `start_timeout` if "
                "they take that long"
            )
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise WorkerFailed(f"{self.description()} ended while it made its environments") from error
        if isinstance(answer, WorkerFailed):
            raise WorkerFailed(f"worker {self.index}: {answer}")
        found: list[tuple[Any, Any, Any]] = answer
        return found

    def share(self, n: int, fields: InfoFields, segment: Segment) -> None:
        """Send the memory as a descriptor, so that the segment needs no name."""
        self.pipe.send((n, fields, segment.size))
        with socket.socket(fileno=os.dup(self.pipe.fileno())) as channel:
            socket.send_fds(channel, [b"m"], [segment.fd])

    @property
    def pipe(self) -> Connection:
        assert self._pipe is not None
        return self._pipe

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, message: bytes) -> bool:
        """Send a message; return False if the worker is gone, or no message can reach it any more."""
        if self._torn:
            return False
        try:
            self.pipe.send_bytes(message)
        except OSError:
            return False
        except BaseException:
            self._torn = True
            raise
        self.busy_since = self.busy_since or time.monotonic()
        return True

    def receive(self) -> bytes | None:
        """Return the worker's next message; None if it is gone, or its messages cannot be told apart any more."""
        if self._torn:
            return None
        try:
            message = self.pipe.recv_bytes()
        except (EOFError, OSError):
            return None
        except BaseException:
            self._torn = True
            raise
        self.busy_since = time.monotonic()
        return message

    def description(self) -> str:
        status = "still running" if self._process is None else self._process.poll()
        return f"worker {self.index} (process {self.pid}, exit status {status})"

    def close_pipe(self) -> None:
        """Close the channel; a worker stops when it sees that."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def end(self, until: float) -> None:
        """Wait for its end until that moment of the monotonic clock, then kill it."""
        self.close_pipe()
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def bring_up(members: Sequence[WorkerProcess], timeout: float) -> list[tuple[Any, Any, Any]]:
    """Start workers; returns spaces and metadata of all their environments, in order.

    Eight for each core start at a time, since more would only take cores and memory from one another. So the time-out
    is for progress, and a hundred workers need no longer one than a few.

    Raises:
        WorkerFailed: as `WorkerProcess.handshake`.
        Timeout: for `timeout` seconds not one more worker has made its environments.
    """
    together = _STARTING_ON_A_CORE * len(os.sched_getaffinity(0))
    found: dict[int, list[tuple[Any, Any, Any]]] = {}
    starting: dict[Connection, WorkerProcess] = {}
    left = iter(members)
    moved = time.monotonic()
    while len(found) < len(members):
        for member in itertools.islice(left, together - len(starting)):
            member.start()
            starting[member.pipe] = member
        ready = wait(list(starting), _CHECK_SECONDS)
        interrupts.check()
        for pipe in ready:
            assert isinstance(pipe, Connection)
            member = starting.pop(pipe)
            found[member.index] = member.handshake()
            moved = time.monotonic()
        if time.monotonic() - moved > timeout:
            slow = ", ".join(str(member.index) for member in starting.values())
            raise Timeout(
                f"{len(found)} of {len(members)} workers have made their environments, and for {timeout:g} s not one "
                f"more has; those that are starting: {slow}. Raise the time-out of the start if they take that long"
            )
    return [each for member in members for each in found[member.index]]


def end_all(members: Sequence[WorkerProcess]) -> None:
    """End workers: asked at first, killed when they have not ended in two seconds."""
    for member in members:
        member.close_pipe()
    until = time.monotonic() + STOP
    for member in members:
        member.end(until)


_DEATHS = 3  # deaths of a worker without finished work in between, before the pool fails


class WorkerPool:
    """Starts workers, and replaces those that die.

    Args:
        make: one function for each environment.
        workers: processes; environments are dealt out evenly, in order.
        mode: what a worker does at the end of an episode.
        timeout: seconds that a worker may work without a message before it counts as dead.
        start_timeout: seconds in which not one more worker has made its environments.

    Attributes:
        pending: per worker the environments that it has not answered for.
        restarts: processes replaced so far; lives: the same by worker.
    """

    def __init__(
        self,
        make: Sequence[Callable[[], Any]],
        workers: int,
        mode: AutoresetMode,
        timeout: float,
        start_timeout: float,
    ) -> None:
        self._timeout, self._start_timeout = timeout, start_timeout
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._members: list[WorkerProcess] = []
        self._deaths = [0] * workers
        self._calls = itertools.count(1)
        self._memory: tuple[int, InfoFields, Segment] | None = None
        self.pending: list[set[int]] = [set() for _ in range(workers)]
        self.owner: list[int] = []
        self.restarts = 0
        self.lives = [0] * workers
        bounds = [round(index * len(make) / workers) for index in range(workers + 1)]
        for index, (first, end) in enumerate(itertools.pairwise(bounds)):
            config = WorkerConfig(list(sys.path), cloudpickle.dumps(list(make[first:end])), first, mode)
            self._members.append(WorkerProcess(index, range(first, end), config))
            self.owner += [index] * (end - first)

    def start(self) -> list[tuple[Any, Any, Any]]:
        """Start all; returns spaces and metadata of every environment."""
        found = bring_up(self._members, self._start_timeout)
        for member in self._members:
            self._selector.register(member.pipe, selectors.EVENT_READ, member)
        return found

    def share(self, n: int, fields: InfoFields, segment: Segment) -> None:
        self._memory = (n, fields, segment)
        for member in self._members:
            member.share(*self._memory)

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self._members]

    def dispatch(self, kind: bytes, numbers: Sequence[int], body: Callable[[list[int]], bytes]) -> list[int]:
        """Send each worker its part of the work; returns the environments whose worker was found dead."""
        self._require_owner()
        parts: dict[int, list[int]] = {}
        for number in numbers:
            parts.setdefault(self.owner[number], []).append(number)
        lost: list[int] = []
        for index, part in parts.items():
            self.pending[index].update(part)
            if not self._members[index].send(kind + body(part)):
                lost += self._replace(self._members[index])
        return lost

    def call(self, request: tuple[Any, ...], numbers: Sequence[int]) -> list[Any]:
        """Call, get or set an attribute of environments that have no step under way; values in order."""
        self._require_owner()
        if any(self.pending):
            raise RuntimeError("expected no step under way, got some: receive their results first")
        values: dict[int, Any] = {}
        kind, *rest = request
        call = next(self._calls)
        for index in sorted({self.owner[number] for number in numbers}):
            member, part = self._members[index], [n for n in numbers if self.owner[n] == index]
            message = self._answer(member, call, cloudpickle.dumps((kind, part, *rest)))
            if message is None:
                description = member.description()
                self._replace(member)
                raise WorkerFailed(
                    f"{description} did not answer {rest[0]!r}; it was replaced, reset its environments {part}"
                )
            if message[:1] == RAISED:
                raise _remote_error(member, message)
            assert message[:1] == VALUE
            values.update(pickle.loads(content_of(message)))
        return [values[number] for number in numbers]

    def _answer(self, member: WorkerProcess, call: int, request: bytes) -> bytes | None:
        """Return a worker's answer to this call; None if it is gone or silent."""
        try:
            if not member.send(call_message(call, request)):
                return None
            while member.pipe.poll(self._timeout):
                message = member.receive()
                # Another number is that of a call that was left before its answer came, by Ctrl-C.
                if message is None or number_of(message) == call:
                    return message
            return None
        finally:
            member.busy_since = None  # also after Ctrl-C: the time of a later step does not begin here

    def wait(self, until: float | None) -> Iterator[tuple[list[int], dict[int, Any], bool]]:
        """Wait for news until that moment; yields environments, their infos of no fixed shape, and whether they are
        lost: the process that held them is gone and a new one holds new ones, which are not reset yet.

        Raises:
            WorkerFailed: an environment raised; the work of its worker is forgotten.
            Timeout: nothing by then.
        """
        self._require_owner()
        now = time.monotonic()
        busy = [member for member in self._members if self.pending[member.index]]
        dead_at = min((member.busy_since or now) + self._timeout for member in busy)
        limit = dead_at if until is None else min(dead_at, until)
        events = self._selector.select(max(0.0, limit - now))
        interrupts.check()
        for key, _ in events:
            member: WorkerProcess = key.data
            message = member.receive()
            if message is None:
                yield self._replace(member), {}, True
            elif message[:1] == DONE:
                numbers, extras = read_done(message)
                self._deaths[member.index] = 0
                self._settle(member, numbers)
                yield numbers, extras, False
            elif message[:1] == RAISED and number_of(message) == 0:  # not of a call that was left early
                self._settle(member, list(self.pending[member.index]))
                raise _remote_error(member, message)
        if not events:
            yield from self._check_timeouts(until)

    def close(self) -> None:
        """End the workers: asked at first, killed when they have not ended in two seconds."""
        if os.getpid() != self._pid:  # a forked child's copy: the workers are its parent's
            return
        with interrupts.held():
            self._selector.close()
            end_all(self._members)

    def _require_owner(self) -> None:
        if os.getpid() != self._pid:
            raise Refused(
                f"these environments belong to process {self._pid}; a forked child that used their workers would take "
                "its parent's answers: make environments in the process that steps them"
            )

    def _check_timeouts(self, until: float | None) -> Iterator[tuple[list[int], dict[int, Any], bool]]:
        now = time.monotonic()
        for member in self._members:
            if self.pending[member.index] and now - (member.busy_since or now) >= self._timeout:
                yield self._replace(member), {}, True
        if until is not None and now >= until:
            count = sum(map(len, self.pending))
            raise Timeout(f"{count} environments have not answered in time; ask again, or raise the time-out")

    def _settle(self, member: WorkerProcess, numbers: list[int]) -> None:
        self.pending[member.index].difference_update(numbers)
        if not self.pending[member.index]:
            member.busy_since = None

    def _replace(self, member: WorkerProcess) -> list[int]:
        """Replace a process; returns all its environments."""
        description = member.description()
        self._deaths[member.index] += 1
        if self._deaths[member.index] > _DEATHS:
            raise WorkerFailed(f"{description} ended, {_DEATHS} times in a row before it had done anything: given up")
        with interrupts.held():
            self._selector.unregister(member.pipe)
            member.end(0.0)
            self.pending[member.index].clear()
            member.busy_since = None
            member.start()
            member.handshake(self._start_timeout)
            assert self._memory is not None
            member.share(*self._memory)
            self._selector.register(member.pipe, selectors.EVENT_READ, member)
        self.restarts += 1
        self.lives[member.index] += 1
        return list(member.numbers)


def _remote_error(member: WorkerProcess, message: bytes) -> WorkerFailed:
    return WorkerFailed(f"worker {member.index}: {pickle.loads(content_of(message))}")
