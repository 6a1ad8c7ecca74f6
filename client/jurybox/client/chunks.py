"""Execute chunks of actions: a policy answers an observation with the actions of the next steps.

`AsyncChunkPolicy` asks ahead in a thread, so that the control loop never waits; `TemporalEnsemble` averages what
several chunks say of one step. Both take any way to ask: a `Model` or `Sessions` of a server, a websocket client.
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

__all__ = ["AsyncChunkPolicy", "ChunkStats", "TemporalEnsemble"]

Ask = Callable[[dict[str, Any], float], ArrayLike]

# What a request of real-time chunking brings beside the observation.
PREFIX = "action_prefix"  # float32 (horizon, dimension): actions from this step on as they are planned, then zeros
PREFIX_LENGTH = "action_prefix_length"  # int32: how many of them are planned; 0 at an episode's beginning
DELAY = "inference_delay"  # int32: so many of them will have been executed when the answer comes

# What a request brings beside the observation with `report`: a map of what happened since the last one that was
# answered. A server's robots port adds it to its metrics, and takes it away before the model.
REPORT = "chunk_report"  # {"delay": s of the last answer, "starved": steps, and for each of DROPPED how many}
DROPPED = ("late", "stale", "failed")
# What a request brings with `send_deadline`: seconds within which the answer is of use. A server's robots port gives a
# request up that was not answered by then, and does not compute it where it can help it.
ANSWER_WITHIN = "answer_within"
_REMEMBERED = 64  # answers whose delays are kept


class TemporalEnsemble:
    """Average the actions that all chunks predict for a step, the oldest weighted most (Zhao et al. 2023, "ACT").

    The weight of the i-th oldest is exp(-m * i). Steps are numbered from 0; none is asked for again.

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
        """Take in a chunk, (horizon, *action), whose first action is of `step`. Later steps come later."""
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
        late: answers dropped since they came after the deadline.
        stale: answers dropped since all their steps were over, or their episode.
        failed: requests that raised, or whose answer was no chunk.
        starved: steps for which there was no action.
        delays: of the last answers, (s, steps) from request to use.
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
        """Seconds from request to answer, the mean of the last answers; 0 before the first."""
        return float(np.mean([seconds for seconds, _ in self.delays])) if self.delays else 0.0

    @property
    def jitter(self) -> float:
        """Standard deviation of the same."""
        return float(np.std([seconds for seconds, _ in self.delays])) if self.delays else 0.0

    @property
    def delay_steps(self) -> int:
        """Steps from request to answer, the most of the last answers; 0 before the first."""
        return max((steps for _, steps in self.delays), default=0)


@dataclass
class _Request:
    observation: dict[str, Any]
    step: int
    episode: int
    sent: float
    answered: float = 0.0
    chunk: NDArray[Any] | None = None
    error: Exception | None = None
    told: dict[str, int] | None = None  # what will have been reported once it is answered


class AsyncChunkPolicy(forks.Closing):
    """Executes chunks while the next one is computed. `act` is called once a control step, and never waits.

    One request is on its way at a time, in a thread of the policy's own. Its answer's first action is of the step at
    which it was asked; by the time it is there some of its actions are over, and the others replace what was planned.

    Example:
        with AsyncChunkPolicy(lambda request, timeout: client.infer(request)["actions"]) as policy:
            policy.begin(observe(), timeout=30)
            while not done:
                action = policy.act(observe())
                robot.step(action if action is not None else robot.hold())

    Args:
        ask: gives the chunk, (horizon, *action), for a request (an observation, as it was passed) within so many
            seconds. Called in the thread; may raise.
        ensemble: the `m` of a TemporalEnsemble, which then chooses among chunks; None: the newest chunk holds.
        real_time: (horizon, dimension) of the model's chunks; requests then bring what is planned and the delay
            to expect, as PREFIX, PREFIX_LENGTH and DELAY (Black et al. 2025, "Real-Time Execution of Action Chunking
            Flow Policies").
        every: steps between two requests at least.
        deadline: seconds within which an answer must come to be used.
        reset_key: an entry of this name, True, is added to an episode's requests until one is answered; "reset" for a
            server's robots port.
        report: whether requests bring what became of the last ones, as REPORT: a server's robots port counts it in its
            metrics.
        send_deadline: whether requests bring `deadline` as ANSWER_WITHIN. Of a model with state the episode is lost
            where the deadline passes: nobody knows whether its step was computed.
        clock: gives seconds.

    Attributes:
        stats: what became of the requests.
        error: what the last request raised; None where it was answered.
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
                "ensemble and real_time both came: real-time chunks continue each other, expected one of them"
            )
        if every < 1 or not deadline > 0:
            raise ValueError(f"every = {every}, deadline = {deadline}: expected at least one step, and a time above 0")
        self._ask = ask
        self._ensemble = None if ensemble is None else TemporalEnsemble(ensemble)
        self._real_time = real_time
        self._every, self._deadline, self._reset_key, self._clock = every, deadline, reset_key, clock
        self._report, self._send_deadline = report, send_deadline
        self._told: dict[str, int] = {}  # counts that a server has been told
        self._delay: float | None = None  # of the last answer, where it has not been told yet
        self.stats = ChunkStats()
        self.error: Exception | None = None
        self._step = self._episode = 0
        self._next_ask = 0  # step
        self._begun = False  # the episode has been answered
        self._plan: tuple[int, NDArray[Any]] | None = None
        self._shape: tuple[int, ...] | None = None  # of an action
        self._changed = threading.Condition()
        self._waiting: _Request | None = None  # for the thread
        self._done: _Request | None = None  # by it
        self._busy = self._closed = False
        self._forked = False
        self._thread = threading.Thread(target=self._work, name="chunks", daemon=True)
        self._thread.start()
        forks.register(self)

    def begin(self, observation: Mapping[str, Any], *, timeout: float) -> None:
        """Wait for an episode's first chunk, before the first `act`.

        Raises:
            Timeout: there is none within `timeout` seconds. What `ask` raised.
        """
        until = time.monotonic() + timeout
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
            None if no chunk covers this step: hold still, or slow down.

        Raises:
            Refused: the policy is closed, or was made before a fork.
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
        """Begin another episode: plans are dropped, and answers that are still to come."""
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

    # ---- inside, under the lock

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
            forked = "was made before a fork, whose thread is not here" if self._forked else "is closed"
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
        told = None
        if self._report:
            told = {name: getattr(self.stats, name) for name in ("starved", *DROPPED)}
            request[REPORT] = {name: count - self._told.get(name, 0) for name, count in told.items()}
            if self._delay is not None:
                request[REPORT]["delay"] = self._delay
        self._waiting = _Request(request, self._step, self._episode, self._clock(), told=told)
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
            self._told, self._delay = done.told or {}, done.answered - done.sent
        if done.episode != self._episode:
            self.stats.stale += 1
            return
        if done.error is not None:
            self.stats.failed += 1
            self.error = done.error
            return
        assert done.chunk is not None
        self.error = None
        self._begun = True  # its observation has reached the model, whatever becomes of the answer
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
            except Exception as error:  # noqa: BLE001  whatever asking raises is told to the control loop
                request.error = error
            request.answered = self._clock()
            with self._changed:
                self._done, self._busy = request, False
                self._changed.notify_all()

    def _checked(self, answer: ArrayLike) -> NDArray[Any]:
        chunk = np.array(answer)  # of its own: an answer may be memory that the next one overwrites
        if chunk.ndim < 1 or not len(chunk) or chunk.dtype.kind not in "biuf":
            raise SpecMismatch(f"an answer of {chunk.dtype}{list(chunk.shape)}: expected actions, (horizon, *action)")
        if self._shape is None:
            self._shape = chunk.shape[1:]
        if chunk.shape[1:] != self._shape:
            raise SpecMismatch(f"an action of shape {chunk.shape[1:]} came, earlier ones had {self._shape}")
        if self._real_time is not None and chunk.shape != self._real_time:
            raise SpecMismatch(f"a chunk of shape {chunk.shape} came: real_time says {self._real_time}")
        if not np.isfinite(chunk).all():
            raise SpecMismatch("an answer holds actions that are no finite numbers")
        return chunk

    def _after_fork_in_child(self) -> None:
        self._changed = threading.Condition()
        self._closed = self._forked = True
