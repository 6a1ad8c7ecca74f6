"""One child process of the supervisor: started, heard, stopped, started again."""

from __future__ import annotations

import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jurybox.protocol.lifeline import Lifeline, spawn
from jurybox.server.supervisor.standby import Standby

# Waits before the first, second, ... restart in a row, in seconds; the last one repeats.
_BACK_OFF = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
_PROVEN = 1.0  # seconds of service after which it does what it should; a ticket that kills comes back sooner
_SHORT = 1.0  # seconds until the next attempt where memory or files were short


def killed_for_memory() -> int | None:
    """How many processes of this machine the kernel has killed for their memory; None where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


class Bystanders:
    """Tells whether a death was somebody else's doing: a kill -9 of a process that served well until then.

    The kernel kills so, too, where memory runs out: that is the process's own doing, as are crashes, and as is what is
    killed because it hangs.
    """

    def __init__(self) -> None:
        self._killed = killed_for_memory()

    def killed(self, status: int, served: float, *, condemned: bool) -> bool:
        """Whether a child with that exit status, that had served so many seconds, was killed from outside.

        Args:
            condemned: it was killed by its parent.
        """
        before, self._killed = self._killed, killed_for_memory()
        own = before is None or before != self._killed
        return status == -signal.SIGKILL and served > _PROVEN and not condemned and not own


class Child:
    """A process that should run.

    Args:
        role: its name in logs ("engine-0", "gateway").
        module: what ``python -m`` runs.
        configure: gives the fields of the first message, anew for every life.
        environment: variables set for it.
        standby: of the same module and environment; a start takes the process that waits there, where one does.
    """

    def __init__(
        self,
        role: str,
        module: str,
        configure: Callable[[], dict[str, Any]],
        environment: dict[str, str] | None = None,
        standby: Standby | None = None,
    ) -> None:
        self.role = role
        self.serving = False
        self.served_at = 0.0  # s of the monotonic clock: since when it serves, where it does
        self.condemned = False  # killed by ourselves
        self.failures = 0  # deaths in a row
        self.restart_at = 0.0
        self.started_at = 0.0
        self.heard_at = 0.0  # s of the monotonic clock; of those who tell that they live
        self._module = module
        self._configure = configure
        self._environment = environment
        self._standby = standby
        self._orders: deque[tuple[str, dict[str, Any]]] = deque()  # one a lane at most, and some
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: Lifeline | None = None

    @property
    def alive(self) -> bool:
        return self._lifeline is not None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def orders_waiting(self) -> int:
        """Orders that it had no room for yet."""
        return len(self._orders)

    def fileno(self) -> int:
        assert self._lifeline is not None
        return self._lifeline.fileno()

    def start(self, now: float) -> None:
        """Start the process and send its configuration.

        Raises:
            Error, OSError: memory or files are short. Nothing was started, and it is due again a second later.
        """
        self.serving = self.condemned = False
        self.started_at = now
        self.restart_at = now + _SHORT
        configuration = self._configure()
        waiting = self._standby.take() if self._standby else None
        self._process, self._lifeline = waiting or spawn(self._module, environment=self._environment)
        self._orders.clear()
        self.send("configure", **configuration)

    def serves(self, now: float) -> None:
        """It says that it does."""
        self.serving, self.served_at = True, now

    def send(self, kind: str, **fields: Any) -> None:
        """Send an order, now or when the child reads again: one that was stopped must not hold its parent.

        A dead child's is dropped, since its death is noticed by `messages`.
        """
        if self._lifeline is not None:
            self._orders.append((kind, fields))
            self.send_waiting()

    def send_waiting(self) -> None:
        """Send what the child had no room for."""
        try:
            while self._orders and self._lifeline is not None and self._lifeline.writable():
                kind, fields = self._orders.popleft()
                self._lifeline.send(kind, **fields)
        except OSError:
            self.serving = False
            self._orders.clear()

    def messages(self) -> Iterator[dict[str, Any]]:
        """What the child said meanwhile; raises EOFError when it is dead."""
        assert self._lifeline is not None
        while (message := self._lifeline.receive(0)) is not None:
            yield message

    def bury(self, now: float, *, settled_after: float) -> int:
        """Clean up after a dead child and plan its restart; gives its exit status.

        One that had served for `settled_after` seconds begins its count of failures anew.
        """
        status = self._end(timeout=2.0)
        if self.serving and now - self.started_at > settled_after:
            self.failures = 0
        self.serving = False
        self.restart_at = now + _BACK_OFF[min(self.failures, len(_BACK_OFF) - 1)]
        self.failures += 1
        return status

    def forgive(self, now: float) -> None:
        """The death just buried counts for nothing: start again at once."""
        self.failures -= 1
        self.restart_at = now

    def kill(self) -> None:
        """End it at once; `messages` will then say that it is dead."""
        if self._process is not None:
            self.condemned = True
            self._process.kill()

    def stop(self, timeout: float) -> None:
        """Ask it to stop, and end it when it has not within `timeout` seconds."""
        if self._process is not None:
            self.send("stop")
            self._end(timeout)
        self.serving = False

    def _end(self, timeout: float) -> int:
        assert self._process is not None
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if self._lifeline is not None:
            self._lifeline.close()
        self._process = self._lifeline = None
        return status
