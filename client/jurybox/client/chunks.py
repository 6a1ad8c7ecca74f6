"""Execute action chunks: a policy answers an observation with the actions of the next steps.

`AsyncChunkPolicy` requests the next chunk in a thread, so that the control loop never waits; `TemporalEnsemble`
averages the actions that several chunks predict for a step. Both work with any source of chunks: a `Model` or
`Sessions` of a server, or a websocket client.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jurybox.protocol import forks
from jurybox.protocol.errors import Refused, SpecMismatch, Timeout
from jurybox.protocol.locks import seconds

__all__ = ["AsyncChunkPolicy", "ChunkStats", "TemporalEnsemble"]

Ask = Callable[[dict[str, Any], float], ArrayLike]

# Keys that a request of real-time chunking has in addition to the observation.
PREFIX = "action_prefix"  # float32 (horizon, dimension): the planned actions from this step on, padded with zeros
PREFIX_LENGTH = "action_prefix_length"  # int32: the number of planned actions; 0 at the beginning of an episode
DELAY = "inference_delay"  # int32: the number of them that are expected to be executed before the answer arrives

# The key that a request has with `report`: a dict of events since the last answered request. A server's robots port
# adds it to its metrics and removes it before the model is called.
REPORT = "chunk_report"  # {"delay": s until the last answer, "starved": steps, and a count for each of DROPPED}
DROPPED = ("late", "stale", "failed")
# The key that a request has with `send_deadline`: seconds within which the answer is useful. A server's robots port
# gives up a request that has not been answered by then, and if possible does not compute it.
ANSWER_WITHIN = "answer_within"
_REMEMBERED = 64  # number of answers whose delays are kept


class TemporalEnsemble:
    """Averages the actions that all chunks predict for a step, with the largest weight for the oldest chunk.

    The weight of the i-th oldest is exp(-m * i) (Zhao et al. 2023, "ACT"). Steps are numbered from 0, and the step
    passed to `action` never decreases.

    Example:
        ensemble = TemporalEnsemble()
        for step in range(400):
            ensemble.add(step, policy(observation))
            action = ensemble.action(step)

    Args:
        m: decay of the weights. 0: equal weights; larger values give new observations less influence.
    """

    def __init__(self, m: float = 0.01) -> None:
        if not m >= 0:
            raise ValueError(f"m = {m}: expected 0 or more")
        self._m = m
        self._chunks: deque[tuple[int, NDArray[Any]]] = deque()

    def add(self, step: int, chunk: ArrayLike) -> None:
        """Add a chunk, (horizon, *action), whose first action is for `step`. Add chunks in the order of their steps."""
        self._chunks.append((step, np.asarray(chunk)))

    def action(self, step: int) -> NDArray[Any] | None:
        """Return the action of a step; None if no chunk covers it."""
        while self._chunks and step >= self._chunks[0][0] + len(self._chunks[0][1]):
            self._chunks.popleft()
        said = [chunk[step - first] for first, chunk in self._chunks if first <= step < first + len(chunk)]
        if not said:
            return None
        weights = np.exp(-self._m * np.arange(len(said)))
        average: NDArray[Any] = np.tensordot(weights / weights.sum(), np.stack(said), axes=1)
        return average.astype(said[0].dtype)

    def reset(self) -> None:
        """Forget all chunks."""
        self._chunks.clear()


@dataclass
class ChunkStats:
    """Counters of an AsyncChunkPolicy's requests.

    Attributes:
        asked, answered: requests sent; answers that were used.
        late: answers dropped because they arrived after the deadline.
        stale: answers dropped because all their steps, or their episode, had ended.
        failed: requests that raised, or whose answer was not a valid chunk.
        starved: steps for which there was no action.
        delays: for the last answers, the seconds from request to answer and the steps from request to use.
    """

    asked: int = 0
    answered: int = 0
    late: int = 0
    stale: int = 0
    failed: int = 0
    starved: int = 0
    delays: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    @property
    def delay(self) -> float:
        """Mean seconds from request to answer over the last answers; 0 before the first."""
        return float(np.mean([seconds for seconds, _ in self.delays])) if self.delays else 0.0

    @property
    def jitter(self) -> float:
        """Standard deviation of the seconds from request to answer over the last answers; 0 before the first."""
        return float(np.std([seconds for seconds, _ in self.delays])) if self.delays else 0.0

    @property
    def delay_steps(self) -> int:
        """Largest number of steps from request to use over the last answers; 0 before the first."""
        return max((steps for _, steps in self.delays), default=0)


@dataclass
class _ChunkRequest:
    observation: dict[str, Any]
    step: int
    episode: int
    sent: float
    answered: float = 0.0
    chunk: NDArray[Any] | None = None
    error: Exception | None = None
    reported: dict[str, int] | None = None  # the counts that are reported once this request is answered


class AsyncChunkPolicy(forks.Closing):
    """Executes chunks while the next one is computed. Call `act` once in each control step; it never blocks.

    One request is in flight at a time, in the policy's own thread. The first action of an answer is for the step at
    which the request was sent. When the answer arrives, some of these steps have passed; the remaining actions replace
    the plan.

    Example:
        with AsyncChunkPolicy(lambda request, timeout: client.infer(request)["actions"]) as policy:
            policy.begin(observe(), timeout=30)
            while not done:
                action = policy.act(observe())
                robot.step(action if action is not None else robot.hold())

    Args:
        ask: called in the thread with a request (the observation, with further keys depending on the options below) and
            a time-out in seconds; returns the chunk, (horizon, *action). It may raise.
        ensemble: `m` of a TemporalEnsemble, which averages the chunks; None: use the newest chunk.
        real_time: (horizon, dimension) of the model's chunks. Requests then include the plan and the expected delay as
            PREFIX, PREFIX_LENGTH and DELAY (Black et al. 2025, "Real-Time Execution of Action Chunking Flow Policies").
        every: minimum number of steps between two requests.
        deadline: seconds after which an answer is dropped.
        reset_key: an entry of this name with the value True is added to an episode's requests until one is answered;
            use "reset" for a server's robots port.
        report: whether requests include statistics of earlier ones as REPORT, which a server's robots port adds to its
            metrics.
        send_deadline: whether requests include `deadline` as ANSWER_WITHIN. If the deadline of a model with state
            passes, the episode is lost, because it is unknown whether its step was computed.
        clock: returns the time in seconds.

    Attributes:
        stats: counters of the requests.
        error: the exception of the last request; None if it was answered.
    """

    def __init__(
        self,
        ask: Ask,
        *,
        ensemble: float | None = None,
        real_time: tuple[int, int] | None = None,
        every: int = 1,
        deadline: float = 10.0,
        reset_key: str | None = None,
        report: bool = False,
        send_deadline: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if ensemble is not None and real_time is not None:
            raise ValueError(
                "ensemble and real_time exclude each other: real-time chunks must not be averaged, expected one of them"
            )
        if every < 1 or not deadline > 0:
            raise ValueError(f"every = {every}, deadline = {deadline}: expected at least one step, and a time above 0")
        self._ask = ask
        self._ensemble = None if ensemble is None else TemporalEnsemble(ensemble)
        self._real_time = real_time
        self._every, self._deadline, self._reset_key, self._clock = every, deadline, reset_key, clock
        self._report, self._send_deadline = report, send_deadline
        self._reported: dict[str, int] = {}  # counts that have been reported to the server
        self._delay: float | None = None  # the last answer's delay, until it has been reported
        self.stats = ChunkStats()
        self.error: Exception | None = None
        self._step = self._episode = 0
        self._next_ask = 0  # step
        self._begun = False  # whether a request of this episode has been answered
        self._plan: tuple[int, NDArray[Any]] | None = None
        self._shape: tuple[int, ...] | None = None  # of an action
        self._changed = threading.Condition()
        self._waiting: _ChunkRequest | None = None  # the request that the thread will send next
        self._done: _ChunkRequest | None = None  # the request that it has finished
        self._busy = self._closed = False
        self._forked = False
        self._thread = threading.Thread(target=self._work, name="chunks", daemon=True)
        self._thread.start()
        forks.register(self)

    def begin(self, observation: Mapping[str, Any], *, timeout: float) -> None:
        """Wait for an episode's first chunk, before the first `act`.

        Raises:
            Timeout: no chunk arrived within `timeout` seconds.
            Exception: whatever `ask` raised.
        """
        until = time.monotonic() + seconds(timeout)
        failed = self.stats.failed
        while True:
            with self._changed:
                self._take()
                if self._action() is not None:
                    return
                if self.error is not None and self.stats.failed > failed:
                    raise self.error
                self._send(observation)
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait_for(lambda: self._done is not None, left):
                    raise Timeout(f"no chunk of actions came within {timeout:.3f} s")

    def act(self, observation: Mapping[str, Any]) -> NDArray[Any] | None:
        """Return the action of this step, and send this observation if no request is in flight.

        Returns:
            The action; None if no chunk covers this step: the robot should hold still or slow down.

        Raises:
            Refused: the policy is closed, or was created before a fork.
        """
        with self._changed:
            self._take()
            if self._step >= self._next_ask:
                self._send(observation)
            action = self._action()
            self._step += 1
            if action is None:
                self.stats.starved += 1
            return action

    def reset(self) -> None:
        """Begin another episode: drop the plan, and the answer of a request that is still in flight."""
        with self._changed:
            self._episode += 1
            self._step = self._next_ask = 0
            self._begun, self._plan, self.error = False, None, None
            if self._ensemble is not None:
                self._ensemble.reset()

    def close(self, timeout: float = 1.0) -> None:
        """Stop the thread. If its request does not end within `timeout` seconds, the thread is left to finish it."""
        with self._changed:
            self._closed = True
            self._waiting = None
            self._changed.notify_all()
        if not self._forked and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    # ---- internals, called with the lock held

    def _action(self) -> NDArray[Any] | None:
        if self._ensemble is not None:
            return self._ensemble.action(self._step)
        if self._plan is None:
            return None
        first, chunk = self._plan
        at = self._step - first
        return chunk[at].copy() if at < len(chunk) else None

    def _send(self, observation: Mapping[str, Any]) -> None:
        if self._closed:
            forked = "was created before a fork and has no thread in this process" if self._forked else "is closed"
            raise Refused(f"the policy {forked}: make another")
        if self._busy or self._waiting is not None or self._done is not None:
            return
        request = dict(observation)
        if self._real_time is not None:
            request |= self._planned(self._real_time)
        if self._reset_key is not None and not self._begun:
            request[self._reset_key] = True
        if self._send_deadline:
            request[ANSWER_WITHIN] = self._deadline
        reported = None
        if self._report:
            reported = {name: getattr(self.stats, name) for name in ("starved", *DROPPED)}
            request[REPORT] = {name: count - self._reported.get(name, 0) for name, count in reported.items()}
            if self._delay is not None:
                request[REPORT]["delay"] = self._delay
        self._waiting = _ChunkRequest(request, self._step, self._episode, self._clock(), reported=reported)
        self._next_ask = self._step + self._every
        self.stats.asked += 1
        self._changed.notify_all()

    def _planned(self, shape: tuple[int, int]) -> dict[str, Any]:
        prefix = np.zeros(shape, np.float32)
        length = 0
        if self._plan is not None:
            left = self._plan[1][self._step - self._plan[0] :]
            length = min(len(left), shape[0])
            prefix[:length] = left[:length]
        delay = min(self.stats.delay_steps, length)
        return {PREFIX: prefix, PREFIX_LENGTH: np.int32(length), DELAY: np.int32(delay)}

    def _take(self) -> None:
        """Use the answer that has arrived, or drop it."""
        done, self._done = self._done, None
        if done is None:
            return
        steps = self._step - done.step
        if done.error is None:
            self._reported, self._delay = done.reported or {}, done.answered - done.sent
        if done.episode != self._episode:
            self.stats.stale += 1
            return
        if done.error is not None:
            self.stats.failed += 1
            self.error = done.error
            return
        assert done.chunk is not None
        self.error = None
        self._begun = True  # the model has received the observation, even if the answer is not used
        self.stats.delays.append((done.answered - done.sent, steps))
        if done.answered - done.sent > self._deadline:
            self.stats.late += 1
        elif steps >= len(done.chunk):
            self.stats.stale += 1
        else:
            self.stats.answered += 1
            if self._ensemble is not None:
                self._ensemble.add(done.step, done.chunk)
            else:
                self._plan = (done.step, done.chunk)

    # ---- the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.wait_for(lambda: self._waiting is not None or self._closed)
                request, self._waiting = self._waiting, None
                if request is None:
                    return
                self._busy = True
            try:
                request.chunk = self._checked(self._ask(request.observation, self._deadline))
            except Exception as error:  # noqa: BLE001  the control loop gets every error of `ask`
                request.error = error
            request.answered = self._clock()
            with self._changed:
                self._done, self._busy = request, False
                self._changed.notify_all()

    def _checked(self, answer: ArrayLike) -> NDArray[Any]:
        chunk = np.array(answer)  # a copy: the next answer may overwrite the memory of this one
        if chunk.ndim < 1 or not len(chunk) or chunk.dtype.kind not in "biuf":
            raise SpecMismatch(f"an answer of {chunk.dtype}{list(chunk.shape)}: expected actions, (horizon, *action)")
        if self._shape is None:
            self._shape = chunk.shape[1:]
        if chunk.shape[1:] != self._shape:
            raise SpecMismatch(f"an action of shape {chunk.shape[1:]} came, earlier ones had {self._shape}")
        if self._real_time is not None and chunk.shape != self._real_time:
            raise SpecMismatch(f"a chunk of shape {chunk.shape} came: real_time says {self._real_time}")
        if not np.isfinite(chunk).all():
            raise SpecMismatch("an answer has actions that are not finite numbers")
        return chunk

    def _after_fork_in_child(self) -> None:
        self._changed = threading.Condition()
        self._closed = self._forked = True
