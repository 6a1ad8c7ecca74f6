"""Environments in worker processes, for Stable-Baselines3: fresh interpreters, without torch, bound to the learner."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from stable_baselines3.common.vec_env import SubprocVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from jurybox.training import interrupts
from jurybox.training.vector.worker import THREAD_LIMITS, WorkerFailed, bound

# Not -m: what a module run as __main__ defines cannot be unpickled here.
_RUN = "from jurybox.training.vector.worker import serve_sb3; serve_sb3()"
_STOP = 2.0  # seconds that workers get to close their environments


class Remote:
    """The learner's end of the pipe to one worker."""

    def __init__(self, index: int, connection: Connection, process: subprocess.Popen[bytes], timeout: float) -> None:
        self._index, self._timeout = index, timeout
        self._connection = connection
        self._process = process
        self._pid = os.getpid()

    def send(self, message: Any) -> None:
        if os.getpid() != self._pid:
            raise WorkerFailed(
                f"worker {self._index} belongs to process {self._pid}; a forked child that used it would take its "
                "parent's answers: make environments in the process that steps them"
            )
        try:
            self._connection.send(message)
        except (BrokenPipeError, ConnectionResetError, BlockingIOError) as error:
            raise self._ended() from error

    def recv(self) -> Any:
        try:
            answer = self._connection.recv()
        except BlockingIOError as error:
            raise WorkerFailed(
                f"worker {self._index} (process {self._process.pid}) has not answered for {self._timeout:g} s: its "
                "environment hangs; py-spy dump --pid shows where. Give WorkerVecEnv a longer timeout if it takes that "
                "long"
            ) from error
        except (EOFError, ConnectionResetError) as error:
            raise self._ended() from error
        if isinstance(answer, WorkerFailed):
            raise WorkerFailed(f"worker {self._index}: {answer}")
        return answer

    def close(self) -> None:
        self._connection.close()

    def _ended(self) -> WorkerFailed:
        try:
            status: object = self._process.wait(_STOP)
        except subprocess.TimeoutExpired:
            status = "unknown, it still runs"
        return WorkerFailed(f"worker {self._index} (process {self._process.pid}) ended; exit status {status}")


class WorkerVecEnv(SubprocVecEnv):
    """SB3's SubprocVecEnv over processes of our own: spawned (never forked), each limited to one thread before its
    first import, without torch (a worker of SB3's imports it: two seconds and 300 MB each), deaf to the terminal's
    Ctrl-C, which is the learner's to handle, and bound to the learner's life.

    Args:
        make: one picklable function for each environment; it is called in the worker.
        timeout: seconds that one answer may take, the making of an environment among them.

    Raises:
        WorkerFailed: an environment could not be made, with the worker's traceback. Every method raises it for
            whatever an environment raises, and for a worker that died or hangs.
    """

    def __init__(self, make: Sequence[Callable[[], Any]], timeout: float = 300.0) -> None:
        self._timeout = timeout
        self.waiting = False
        self.closed = False
        self._pid = os.getpid()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.remotes: list[Remote] = []
        try:
            for index, function in enumerate(make):
                self._start(index, pickle.dumps(function))
            # All of them are asked, so that none is still importing when training begins and counts the time.
            for remote in self.remotes:
                remote.send(("get_spaces", None))
            spaces = [remote.recv() for remote in self.remotes]
        except BaseException:
            self.close()
            raise
        VecEnv.__init__(self, len(spaces), *spaces[0])

    def close(self) -> None:
        """End the workers: asked at first, killed when they have not ended in two seconds."""
        with interrupts.held():
            if self.closed:
                return
            self.closed = True
            if os.getpid() != self._pid:  # a forked child's copy: the workers are its parent's
                return
            for remote in self.remotes:
                remote.close()  # a worker takes the end of its pipe for the order to stop
            until = time.monotonic() + _STOP
            for process in self.processes:
                try:
                    process.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _start(self, index: int, make: bytes) -> None:
        ours, theirs = socket.socketpair()
        bound(ours, self._timeout)
        with theirs, interrupts.blocked_for_children():
            command = [sys.executable, "-P", "-c", _RUN]
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **THREAD_LIMITS},
            )
            connection = Connection(ours.detach())
            self.processes.append(process)
            self.remotes.append(Remote(index, connection, process, self._timeout))
        connection.send(sys.path)
        connection.send_bytes(make)
