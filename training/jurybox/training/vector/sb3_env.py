"""Environments in worker processes, for Stable-Baselines3: fresh interpreters, without torch, bound to the learner."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
from stable_baselines3.common.vec_env import SubprocVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from jurybox.training import interrupts
from jurybox.training.vector.worker import WorkerConfig, WorkerFailed
from jurybox.training.vector.worker_pool import STOP, WorkerProcess, bring_up, end_all

__all__ = ["WorkerVecEnv"]


class Remote:
    """The learner's end of the pipe to one worker, as SubprocVecEnv uses it."""

    def __init__(self, member: WorkerProcess, timeout: float) -> None:
        self.member = member
        self._timeout = timeout
        self._pid = os.getpid()
        self._sent = 0  # commands; each is answered under its number

    def send(self, message: Any) -> None:
        if os.getpid() != self._pid:
            raise WorkerFailed(
                f"worker {self.member.index} belongs to process {self._pid}; a forked child that used it would take "
                "its parent's answers: make environments in the process that steps them"
            )
        try:
            self._sent += 1
            # Actions are arrays; anything else may hold lambdas, and classes of a `__main__` that workers have not.
            pickled = pickle.dumps if message[0] == "step" else cloudpickle.dumps
            self.member.pipe.send_bytes(pickled((self._sent, message)))
        except (BrokenPipeError, ConnectionResetError, BlockingIOError) as error:
            raise self._ended() from error

    def recv(self) -> Any:
        try:
            number = 0
            while number != self._sent:  # else the answer to a command whose caller left before it came, by Ctrl-C
                number, answer = self.member.pipe.recv()
        except BlockingIOError as error:
            raise WorkerFailed(
                f"worker {self.member.index} (process {self.member.pid}) has not answered for {self._timeout:g} s: its "
                "environment hangs; py-spy dump --pid shows where. Give WorkerVecEnv a longer timeout if it takes that "
                "long"
            ) from error
        except (EOFError, ConnectionResetError) as error:
            raise self._ended() from error
        if isinstance(answer, WorkerFailed):
            raise WorkerFailed(f"worker {self.member.index}: {answer}")
        return answer

    def _ended(self) -> WorkerFailed:
        try:
            status: object = self.member.process.wait(STOP)
        except subprocess.TimeoutExpired:
            status = "unknown, it still runs"
        return WorkerFailed(f"worker {self.member.index} (process {self.member.pid}) ended; exit status {status}")


class WorkerVecEnv(SubprocVecEnv):
    """SB3's SubprocVecEnv over processes of our own: spawned (never forked), each limited to one thread before its
    first import, without torch (a worker of SB3's imports it: two seconds and 300 MB each), deaf to the terminal's
    Ctrl-C, which is the learner's to handle, and bound to the learner's life.

    Args:
        env_fns: one function for each environment, called in its worker. Lambdas will do, and what a script or a
            notebook defines (cloudpickle), as for SubprocVecEnv.
        timeout: seconds that one answer may take; at the start, seconds in which not one more worker has made its
            environment.
        start_method: as SubprocVecEnv's: None or "spawn". Workers are never forked.

    Raises:
        WorkerFailed: an environment could not be made, with the worker's traceback. Every method raises it for
            whatever an environment raises, and for a worker that died or hangs.
        Timeout: the environments were not made in time.
        ValueError: another start_method.
    """

    def __init__(
        self, env_fns: Sequence[Callable[[], Any]], timeout: float = 300.0, start_method: str | None = None
    ) -> None:
        if start_method not in (None, "spawn"):
            raise ValueError(
                f"start_method={start_method!r}: expected None or 'spawn', since workers are fresh interpreters; leave "
                "it out"
            )
        self.waiting = False
        self.closed = False
        self._pid = os.getpid()
        self._members: list[WorkerProcess] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.remotes: list[Remote] = []
        try:
            for index, function in enumerate(env_fns):
                config = WorkerConfig(list(sys.path), cloudpickle.dumps([function]), index, None)
                self._members.append(WorkerProcess(index, range(index, index + 1), config, timeout))
            # All of them are awaited, so that none is still importing when training begins and counts the time.
            spaces = bring_up(self._members, timeout)
            self.remotes = [Remote(member, timeout) for member in self._members]
            self.processes = [member.process for member in self._members]
        except BaseException:
            self.close()
            raise
        observation, action, _ = spaces[0]
        VecEnv.__init__(self, len(spaces), observation, action)

    def close(self) -> None:
        """Ask the workers to end, and kill them after two seconds."""
        with interrupts.held():
            if self.closed:
                return
            self.closed = True
            if os.getpid() == self._pid:  # not in a forked child: the workers are its parent's
                end_all(self._members)
