"""A model of a server that remembers, which a role asks through sessions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jurybox.client import Model, Reply, SessionLost
from jurybox.training.runtime.plan import PolicyServer
from jurybox.training.runtime.serving import AWAY, CALL_TIMEOUT, LeasedModel
from jurybox.training.spaces import MEMORY, REMEMBERED

if TYPE_CHECKING:
    from jurybox.client.sessions import Sessions
    from jurybox.client.ticket import Ticket


class LeasedSessions(LeasedModel):
    """A model of a server that remembers: row i is asked through session i, whose memory the server keeps.

    It has a copy, from an output of the model. So the sessions go on where they were after a failure of the server, and
    after an answer that was not taken because its weights were too old: their memory is set back first.

    Args:
        numbers: that the model remembers.
        options: those of `LeasedModel`; each request has all of its `rows`.

    Attributes:
        memory: float32 (rows, numbers), before the next step; replaced and not written to by a step.
    """

    _away = (*AWAY, SessionLost)

    def __init__(
        self,
        server: PolicyServer | None,
        channel: str,
        rows: int,
        alive: Callable[[], None],
        *,
        numbers: int,
        **options: Any,
    ) -> None:
        super().__init__(server, channel, rows, alive, **options)
        self.memory = np.zeros((rows, numbers), np.float32)
        self._begun = np.zeros(rows, np.bool_)
        self._in_step = False  # whether the server has this memory, but for sessions that begin
        self._sessions: Sessions | None = None

    def begin(self, row: int) -> None:
        """Let a session begin: it remembers nothing."""
        self.memory[row], self._begun[row] = 0.0, True

    def remember(self, memory: npt.NDArray[Any]) -> None:
        """Let the sessions go on with this memory (rows, numbers)."""
        self.memory, self._in_step = np.array(memory, np.float32), False

    def _opened(self, model: Model, undo: ExitStack) -> None:
        self._sessions, self._in_step = undo.enter_context(model.sessions(self._rows)), False

    def _sent(self, model: Model, rows: Any, version: int) -> Ticket:
        sessions, begun = self._prepared()
        return sessions.submit(rows, reset=begun, timeout=CALL_TIMEOUT, version=version or None)

    def _asked(self, model: Model, rows: Any, version: int) -> Reply:
        sessions, begun = self._prepared()
        return sessions.infer_reply(rows, reset=begun, timeout=CALL_TIMEOUT, version=version or None)

    def _prepared(self) -> tuple[Sessions, npt.NDArray[np.bool_] | None]:
        """Let the server have the memory; returns the sessions that begin with the next request. None: they do not."""
        sessions = self._sessions
        assert sessions is not None
        begun: npt.NDArray[np.bool_] | None = self._begun
        if not self._in_step:
            sessions.set_state({MEMORY: self.memory}, timeout=CALL_TIMEOUT)
            begun = None
        self._in_step = False  # until its answer is taken
        return sessions, begun

    def _taken(self, reply: Reply) -> Reply:
        self.memory = np.array(reply.outputs[REMEMBERED], np.float32)
        self._begun[:] = False
        self._in_step = True
        return reply
