"""The env worker: a process that holds environments and steps them for a learner. It never imports torch.

`main` creates the environments and answers messages until the learner has ended. The answers depend on the kind of
learner:

- `SharedMemoryHandler`, for `ProcessVectorEnv`: results go to shared memory. The first byte of a message is its kind:

      to the worker                                     from it
      S  environments' numbers (int32): step them       D  numbers (int32), rest: infos of no fixed shape, pickled
      E  the same, each answered soon after it is done       V  number of the call (uint64), a value, pickled
      R  pickled: seeds by number, options              X  number of the call or 0, what was raised, pickled
      C  number of the call (uint64), pickled: call, get or set an attribute

  A learner that left a call early (Ctrl-C) knows by the number that the answer to its next one is not that answer.

- `CommandHandler`, for `WorkerVecEnv`: the pickled commands of Stable-Baselines3's SubprocVecEnv, one environment.
  Commands and answers are numbered as well.

Both ends are of one program and one user, and nothing else can write to the socket: pickle is safe here.
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from gymnasium import Env
from gymnasium.vector import AutoresetMode

from jurybox.processes import end_with, thread_limits
from jurybox.protocol.descriptors import receive_descriptors
from jurybox.protocol.segment import Segment
from jurybox.training.spaces import begun, converted, stepped, take
from jurybox.training.vector.layout import arrange, put

THREAD_LIMITS = thread_limits(1)


class WorkerFailed(RuntimeError):
    """An environment raised in its worker; the message holds the worker's traceback."""


def execute(environment: Any, command: str, data: Any) -> Any:
    """The environment's answer to a command of SubprocVecEnv; a `WorkerFailed` where it raised."""
    try:
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
    except Exception as error:  # noqa: BLE001 (the learner raises it)
        return worker_error(error)


def _step(environment: Any, action: Any) -> tuple[Any, float, bool, dict[str, Any], dict[str, Any]]:
    observation, reward, terminated, truncated, told = stepped(environment.step(action), finite=False)
    over, info = terminated or truncated, dict(told)
    info["TimeLimit.truncated"] = truncated and not terminated
    reset_info: Mapping[str, Any] = {}
    if over:
        # Copies: the environment may reuse its arrays in `reset`.
        info = copy.deepcopy({**info, "terminal_observation": observation})
        observation, reset_info = begun(environment.reset())
    return observation, reward, over, info, dict(reset_info)


def _is_wrapped(environment: Any, kind: type) -> bool:
    import gymnasium

    layer = environment
    while isinstance(layer, gymnasium.Wrapper):
        if isinstance(layer, kind):
            return True
        layer = layer.env
    return False


def worker_error(error: Exception) -> WorkerFailed:
    # The exception itself may not survive a pipe, and its traceback never does.
    text = "".join(traceback.format_exception(error)).rstrip()
    return WorkerFailed(f"{type(error).__name__}: {error}\n\nin the worker:\n{text}")


STEP, STEP_EACH, RESET, CALL = b"S", b"E", b"R", b"C"
DONE, VALUE, RAISED = b"D", b"V", b"X"
_COUNT = struct.Struct("<I")
_CALL = struct.Struct("<Q")
_REPORT_SECONDS = 100e-6  # seconds; steps shorter than that are reported together


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The first message to a worker.

    Attributes:
        path: sys.path of the learner, so that what it can import can be imported here.
        make: pickled list of functions, one for each environment of this worker.
        first: number of the first one; the others follow.
        mode: what happens at the end of an episode; None: the worker answers SubprocVecEnv's commands.
    """

    path: list[str]
    make: bytes
    first: int
    mode: AutoresetMode | None


def pickled(value: Any) -> bytes:
    """Pickle what an environment gave or is given. What pickle refuses, such as objects of a ``__main__``, by value."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 (of any kind, for a function without a name, say)
        import cloudpickle

        found: bytes = cloudpickle.dumps(value)
        return found


def done_message(numbers: Any, extras: dict[int, Any]) -> bytes:
    """The message that these environments are done; `extras` are infos that are not in shared memory, by number."""
    head = DONE + _COUNT.pack(len(numbers)) + np.asarray(numbers, np.int32).tobytes()
    return head + pickled(extras) if extras else head


def read_done(message: bytes) -> tuple[list[int], dict[int, Any]]:
    """The inverse of `done_message`."""
    count = _COUNT.unpack_from(message, 1)[0]
    end = 1 + _COUNT.size + 4 * count
    numbers = np.frombuffer(message, np.int32, count, 1 + _COUNT.size).tolist()
    return numbers, pickle.loads(message[end:]) if len(message) > end else {}


def call_message(number: int, request: bytes) -> bytes:
    """The message that makes a call, whose number is 1 or more."""
    return CALL + _CALL.pack(number) + request


def number_of(message: bytes) -> int:
    """The number of the call that a message makes or answers; 0 for answers to others."""
    return int(_CALL.unpack_from(message, 1)[0]) if message[:1] in (CALL, VALUE, RAISED) else 0


def content_of(message: bytes) -> bytes:
    """What is pickled in such a message."""
    return message[1 + _CALL.size :]


# A handler yields the answers to a message, each of which is sent at once, and has one for an exception in between.


class CommandHandler:
    """The commands of SubprocVecEnv, for one environment."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._number = 0  # of the command that is being answered

    def answer(self, message: bytes) -> Iterator[bytes]:
        self._number, command = pickle.loads(message)
        yield pickled((self._number, execute(self._environment, *command)))

    def failed(self, error: Exception) -> bytes:
        return pickle.dumps((self._number, worker_error(error)))


class SharedMemoryHandler:
    """Steps and resets whose results go to shared memory."""

    def __init__(self, config: WorkerConfig, environments: list[Env[Any, Any]], pipe: Connection) -> None:
        self._environments = dict(enumerate(environments, config.first))
        self._mode = config.mode
        self._extras: dict[int, Any] = {}
        self._call_number = 0  # of the message that is being answered
        n, fields, size = pipe.recv()
        with socket.socket(fileno=pipe.fileno()) as channel:
            _, (memory,) = receive_descriptors(channel, 1, 1)
            channel.detach()
        segment = Segment("environments", memory, size, owned=False)
        finals = self._mode is AutoresetMode.SAME_STEP
        spaces = environments[0].observation_space, environments[0].action_space
        self._shared, _ = arrange(n, *spaces, fields, finals=finals, segment=segment)

    def answer(self, message: bytes) -> Iterator[bytes]:
        kind = message[:1]
        self._call_number = number_of(message)
        if kind in (STEP, STEP_EACH):
            numbers = np.frombuffer(message, np.int32, offset=1).tolist()
            reported_at = time.perf_counter()
            done: list[int] = []
            for number in numbers:
                self._step(number)
                done.append(number)
                if kind == STEP_EACH and (now := time.perf_counter()) - reported_at >= _REPORT_SECONDS:
                    yield self._done_message(done)
                    reported_at, done = now, []
            if done:
                yield self._done_message(done)
        elif kind == RESET:
            seeds, options = pickle.loads(message[1:])
            for number, seed in seeds.items():
                self._reset(number, seed, options)
            yield self._done_message(list(seeds))
        else:
            found = pickled(self._call(*pickle.loads(content_of(message))))
            yield VALUE + _CALL.pack(self._call_number) + found

    def failed(self, error: Exception) -> bytes:
        return RAISED + _CALL.pack(self._call_number) + pickle.dumps(worker_error(error))

    def _done_message(self, numbers: list[int]) -> bytes:
        extras, self._extras = self._extras, {}
        return done_message(numbers, extras)

    def _step(self, number: int) -> None:
        shared, environment = self._shared, self._environments[number]
        if self._mode is AutoresetMode.NEXT_STEP and shared.over[number]:
            self._reset(number)
            return
        found = stepped(environment.step(take(shared.actions, number)), finite=False)
        observation, shared.rewards[number], terminated, truncated, info = found
        shared.terminated[number], shared.truncated[number] = terminated, truncated
        over = terminated or truncated
        if over and self._mode is AutoresetMode.SAME_STEP:
            put(shared.final_observations, number, observation, "an observation")
            if more := _write_infos(number, info, shared.final_infos, shared.final_info_masks):
                self._extras[number] = ({}, copy.deepcopy(more))  # the environment may reuse its arrays in `reset`
            observation, info = begun(environment.reset())
            over = False
        shared.over[number] = over
        put(shared.observations, number, observation, "an observation")
        self._set_info(number, info)

    def _reset(self, number: int, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        shared = self._shared
        observation, info = begun(self._environments[number].reset(seed=seed, options=options))
        put(shared.observations, number, observation, "an observation")
        shared.rewards[number] = 0.0
        shared.terminated[number] = shared.truncated[number] = shared.over[number] = False
        self._set_info(number, info)

    def _set_info(self, number: int, info: Mapping[str, Any]) -> None:
        if more := _write_infos(number, info, self._shared.infos, self._shared.info_masks):
            self._extras[number] = (more, self._extras.get(number, ({}, {}))[1])

    def _call(self, kind: str, numbers: list[int], name: str, *rest: Any) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for number in numbers:
            environment = self._environments[number]
            if kind == "set":
                environment.set_wrapper_attr(name, rest[0][number])
                found[number] = None
            else:
                value = environment.get_wrapper_attr(name)
                found[number] = value(*rest[0], **rest[1]) if kind == "call" and callable(value) else value
        return found


def _write_infos(
    number: int, info: Mapping[str, Any], fields: dict[str, Any], masks: dict[str, Any]
) -> Mapping[str, Any]:
    """Write declared infos to shared memory, and return the rest."""
    for name, field in fields.items():
        if name in info:
            field[number] = converted(info[name], field.dtype, field.shape[1:], f"info[{name!r}]", finite=False)
            masks[name][number] = True
        else:
            masks[name][number] = False
    return {name: value for name, value in info.items() if name not in fields} if info else info


def main() -> None:
    """Serve the learner at the other end of the descriptor that is the first argument; the second is its process id."""
    descriptor, parent = map(int, sys.argv[1:])
    os.set_inheritable(descriptor, False)  # else a simulator that an environment starts would hide this process's end
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which the learner handles
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked from before the first instruction until here
    # A worker that waits for the server does not read its pipe, so the pipe's end alone would come late.
    end_with(parent)
    pipe = Connection(descriptor)
    try:
        config: WorkerConfig = pipe.recv()
    except EOFError:
        return
    sys.path[:] = config.path
    environments: list[Env[Any, Any]] = []
    try:
        functions: list[Callable[[], Env[Any, Any]]] = pickle.loads(config.make)  # from who started this process
        environments += [function() for function in functions]
        pipe.send([(each.observation_space, each.action_space, getattr(each, "metadata", {})) for each in environments])
        handler = (
            CommandHandler(environments[0]) if config.mode is None else SharedMemoryHandler(config, environments, pipe)
        )
    except (EOFError, ConnectionError):
        return
    except Exception as error:  # noqa: BLE001 (the learner raises it)
        pipe.send(worker_error(error))
        return
    if (cv2 := sys.modules.get("cv2")) is not None:
        cv2.setNumThreads(0)
    try:
        _serve(pipe, handler)
    finally:
        for environment in environments:
            environment.close()


def _serve(pipe: Connection, handler: CommandHandler | SharedMemoryHandler) -> None:
    """Answer until the other end is gone."""
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        replies = handler.answer(message)
        while True:
            try:
                reply = next(replies, None)
            except Exception as error:  # noqa: BLE001 (the learner raises it)
                reply = handler.failed(error)
            if reply is None:
                break
            try:
                pipe.send_bytes(reply)
            except OSError:
                return
