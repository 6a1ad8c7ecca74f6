"""An env worker: a process that holds one environment and answers a learner through a pipe. It never imports torch.

The messages are those of Stable-Baselines3's SubprocVecEnv, so that its other end can be used as it is.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from jurybox.processes import thread_limits

THREAD_LIMITS = thread_limits(1)
_PR_SET_PDEATHSIG = 1


class WorkerFailed(RuntimeError):
    """An environment raised in its worker; the message holds the worker's traceback."""


def bound(end: socket.socket, seconds: float) -> None:
    """Let no send or receive at this end of a pipe take longer: it then raises BlockingIOError."""
    for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        whole, part = divmod(seconds, 1.0)
        end.setsockopt(socket.SOL_SOCKET, direction, struct.pack("@ll", int(whole), int(part * 1e6)))


def main() -> None:
    """Serve the learner at the other end of the descriptor that is the first argument; the second is its process id."""
    descriptor, parent = map(int, sys.argv[1:])
    bind_to(parent)
    pipe = Connection(descriptor)
    try:
        sys.path[:] = pipe.recv()
        make = pipe.recv_bytes()
    except EOFError:
        return
    try:
        environment = pickle.loads(make)()  # from the process that started this one
    except Exception as error:  # noqa: BLE001 (the learner raises it)
        _tell(pipe, described(error))
        return
    if (cv2 := sys.modules.get("cv2")) is not None:
        cv2.setNumThreads(0)
    try:
        _serve(pipe, environment)
    finally:
        environment.close()
        pipe.close()


def bind_to(parent: int) -> None:
    """Leave the terminal's signals to the parent, and die with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked from before the first instruction until here
    if sys.platform == "linux":
        # A worker that waits for the server does not read its pipe, so the pipe's end alone would come late.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the order stood
        os._exit(1)


def _serve(pipe: Connection, environment: Any) -> None:
    while True:
        try:
            command, data = pipe.recv()
        except (EOFError, ConnectionError):
            return
        if command == "close":
            return
        if not _tell(pipe, answered(environment, command, data)):
            return


def answered(environment: Any, command: str, data: Any) -> Any:
    """The environment's answer to a command of SubprocVecEnv; a `WorkerFailed` where it raised."""
    try:
        return _answer(environment, command, data)
    except Exception as error:  # noqa: BLE001 (the learner raises it)
        return described(error)


def _answer(environment: Any, command: str, data: Any) -> Any:
    match command:
        case "step":
            return _step(environment, data)
        case "reset":
            seed, options = data
            return environment.reset(seed=seed, **({"options": options} if options else {}))
        case "render":
            return environment.render()
        case "get_spaces":
            return environment.observation_space, environment.action_space
        case "env_method":
            name, arguments, named = data
            return environment.get_wrapper_attr(name)(*arguments, **named)
        case "get_attr":
            return environment.get_wrapper_attr(data)
        case "has_attr":
            return environment.has_wrapper_attr(data)
        case "set_attr":
            return environment.set_wrapper_attr(*data)
        case "is_wrapped":
            return _is_wrapped(environment, data)
    raise NotImplementedError(f"a worker does not know the command {command!r}")


def _step(environment: Any, action: Any) -> tuple[Any, float, bool, dict[str, Any], dict[str, Any]]:
    observation, reward, terminated, truncated, info = environment.step(action)
    over = terminated or truncated
    info["TimeLimit.truncated"] = truncated and not terminated
    reset_info: dict[str, Any] = {}
    if over:
        info["terminal_observation"] = observation
        observation, reset_info = environment.reset()
    return observation, reward, over, info, reset_info


def _is_wrapped(environment: Any, kind: type) -> bool:
    import gymnasium

    layer = environment
    while isinstance(layer, gymnasium.Wrapper):
        if isinstance(layer, kind):
            return True
        layer = layer.env
    return False


def described(error: Exception) -> WorkerFailed:
    # The exception itself may not survive a pipe, and its traceback never does.
    text = "".join(traceback.format_exception(error)).rstrip()
    return WorkerFailed(f"{type(error).__name__}: {error}\n\nin the worker:\n{text}")


def _tell(pipe: Connection, answer: Any) -> bool:
    try:
        pipe.send(answer)
    except (OSError, ValueError):
        return False
    return True
