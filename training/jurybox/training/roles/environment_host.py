"""A worker's environments in a process of their own: ``python -m jurybox.training.roles.environment_host FD``.

They are made once and stay for the whole run, whichever of its processes has them: the actor, a successor of a killed
one, the evaluator, whoever looks at their spaces. One request is carried out at a time, and one process at a time holds
them. Requests and answers are pickles over a socket in a folder that only this user may enter.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from jurybox.processes import ControlPipe, attach
from jurybox.training.environments.adapter import Moved
from jurybox.training.environments.stock import stocked

_log = logging.getLogger("jurybox.environments")


class EnvironmentHost:
    """Carries out requests until the control pipe's other end is closed.

    Args:
        listener: a socket that listens.
        control_pipe: to the process that started this one.
    """

    def __init__(self, listener: socket.socket, control_pipe: ControlPipe) -> None:
        self._listener, self._control_pipe = listener, control_pipe
        self._adapters: dict[Connection, Any] = {}
        self._connections: list[Connection] = []
        self._holders: list[Connection] = []  # the first has the environments, the others wait for them, in order

    def serve(self) -> None:
        """Carry out requests."""
        pipe, door = self._control_pipe.fileno(), self._listener.fileno()
        while True:
            ready = wait([pipe, door, *self._connections])
            if pipe in ready:
                return  # the run is over: nothing else is ever sent
            if door in ready:
                self._connections.append(Connection(self._listener.accept()[0].detach()))
            for connection in [each for each in self._connections if each in ready]:
                self._listen(connection)

    def _listen(self, connection: Connection) -> None:
        """Carry out one request of a connection."""
        try:
            kind, what, given = connection.recv()
        except (EOFError, OSError):  # its process has ended, with or without order
            self._connections.remove(connection)
            self._adapters.pop(connection, None)
            if connection in self._holders:
                self._leave(connection)
            connection.close()
            return
        if what == "hold":
            self._holders.append(connection)
            if self._holders[0] is connection:
                self._answer(connection, self._lend)
        elif what == "release":
            self._answer(connection, lambda _: None)
            self._leave(connection)
        else:
            self._answer(connection, lambda asked: self._carried_out(asked, kind, what, given))

    def _leave(self, connection: Connection) -> None:
        """The next of those who wait has the environments, if this one had them."""
        had = self._holders[0] is connection
        self._holders.remove(connection)
        if had and self._holders:
            self._answer(self._holders[0], self._lend)

    def _answer(self, connection: Connection, request: Callable[[Connection], Any]) -> None:
        try:
            answer = pickle.dumps((True, request(connection)))
        except BaseException as error:  # noqa: BLE001  of the environment, also sys.exit: whoever asked raises it
            _log.info("a request failed", exc_info=True)
            answer = pickle.dumps((False, _portable(error)))
        try:
            connection.send_bytes(answer)
        except OSError:
            _log.info("nobody waits for an answer any more")

    def _lend(self, connection: Connection) -> Any:
        return self._adapters[connection].hold(lambda: None)

    def _carried_out(self, connection: Connection, kind: str, what: Any, given: Sequence[Any]) -> Any:
        if kind == "call":
            return what(*given)
        if kind == "make":
            adapter = self._adapters[connection] = what(**given[0])
            return {"name": adapter.name, "bound": adapter.bound, "agents": tuple(adapter.agents)}
        found = getattr(self._adapters[connection], what)(*given)
        return found._replace(numbers=dict(found.numbers)) if isinstance(found, Moved) else found


def _portable(error: BaseException) -> BaseException:
    """Return an exception that another process can raise: the same, if it can be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  whatever its class does
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def main() -> None:
    control_pipe = attach(int(sys.argv[1]))
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    message = control_pipe.receive(30.0)
    if message is None:
        sys.exit("no configuration came; this module is started by a training")
    sys.path[:] = message["path"]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(message["address"])
        listener.listen()
        control_pipe.send("ready")
        with stocked():
            EnvironmentHost(listener, control_pipe).serve()
    logging.shutdown()
    os._exit(0)  # whatever threads an environment leaves


if __name__ == "__main__":
    main()
