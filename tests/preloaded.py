"""Servers and commands that start with their imports done, which are most of a start's seconds.

A *nursery* is a process that has imported what supervisor, engine, gateway and relay import, and forks what it is asked
for. There is one for all servers of a process that runs tests. A server begins with a nursery of its own, which forks
what its supervisor would start as new interpreters. Everything else is as without: each role is a process of its own,
with its arguments, variables, folder, control pipe and signals, and dies with its parent.

This file is run as a program, too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jurybox.processes import ControlPipe, set_timeouts, spawn

NAME = "test-nursery"  # of the process, in /proc/PID/comm
_ROLES = ("engine", "gateway", "relay")
_IMPORTED = (
    "jurybox.server.commands.app",
    "jurybox.server.supervisor.run",
    *(f"jurybox.server.{role}.process" for role in _ROLES),
    # What a gateway imports once it knows its ports.
    "uvloop",
    "pydantic.v1",
    "encodings.idna",
    "jurybox.server.gateway.remote_weights",
    "jurybox.server.gateway.inference.grpc_inference",
)
_PARENT = "_JURYBOX_PARENT"  # of jurybox.processes
_PATH = "PYTHONPATH"
_LARGEST = 1 << 17  # bytes of a request, which is one datagram
_PR_SET_PDEATHSIG, _PR_SET_NAME, _M_ARENA_MAX = 1, 15, -8
_LIBC = ctypes.CDLL(None, use_errno=True)


class Process:
    """A process that a nursery has forked, with what tests and supervisors use of `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], pid: int, status: int) -> None:
        self.args = list(arguments)
        self.pid = pid
        self.returncode: int | None = None
        self._status = status  # a pipe, to which the nursery writes how it ended
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        if (code := self._wait(timeout)) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        with self._lock:
            if self.returncode is None:
                poll = select.poll()
                poll.register(self._status, select.POLLIN)
                if poll.poll(None if timeout is None else max(0.0, timeout) * 1000):
                    # Nothing comes from a nursery that was killed, and its children with it.
                    ended = os.read(self._status, 16)
                    self.returncode = os.waitstatus_to_exitcode(int(ended)) if ended else -signal.SIGKILL
                    os.close(self._status)
            return self.returncode


class Nursery:
    """The way to a nursery.

    Args:
        pid: of the nursery.
        asked: a connected socket of datagrams, whose other end it has.
    """

    def __init__(self, pid: int, asked: socket.socket) -> None:
        self.pid = pid
        self._asked = asked
        self._lock = threading.Lock()

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        files: Sequence[int] = (),
        outputs: Sequence[int] = (),
        **more: object,
    ) -> Process:
        """Fork a process; `files` are its descriptors 3, 4, ...; the last of `outputs` takes its errors."""
        request = {"arguments": list(arguments), "environment": dict(environment), "folder": str(Path.cwd()), **more}
        status, told = os.pipe()
        try:
            with self._lock:
                given = [told, *outputs, *files]
                socket.send_fds(self._asked, [json.dumps({**request, "outputs": len(outputs)}).encode()], given)
                answer = self._asked.recv(16)
        except BaseException:
            os.close(status)
            raise
        finally:
            os.close(told)
        if not answer:
            os.close(status)
            raise ConnectionError(f"the nursery with process id {self.pid} has ended, and forks no {arguments[0]}")
        return Process(arguments, int(answer), status)

    def end(self) -> None:
        """Ask for nothing more, and wait until the nursery has ended."""
        self._asked.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


_at_start = dict(os.environ)
_READ_AT_START = ("GLIBC_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON")  # when a program or library begins
_of_tests: dict[int, Nursery] = {}  # by the process that has it: a forked one may not ask its parent's
wanted = False  # set by tests/conftest.py: benchmarks start what users start


def collected() -> None:
    """Note the variables as they are before the first test: packages that tests import change some (OpenCV does)."""
    _at_start.clear()
    _at_start.update(os.environ)


def may_start(python: str, environment: Mapping[str, str], under: Sequence[object]) -> bool:
    """Whether a server can be forked: in this interpreter, not under another program, with what a nursery has read.

    PYTHONPATH may differ: a fork takes it over. But modules on it hide none that a nursery has imported.
    """
    read = {name for name in {*environment, *_at_start} if name.startswith(_READ_AT_START)} - {_PATH}
    same = all(environment.get(name) == _at_start.get(name) for name in read)
    return wanted and python == sys.executable and same and not under


def serve(arguments: Sequence[str], environment: Mapping[str, str], output: int) -> Process:
    """Start ``jurybox serve ARGUMENTS`` in a session of its own; it is stopped when this process ends in any way."""
    return _of_this_process().start(
        ["jurybox", "serve", *arguments], environment, outputs=[output], module="jurybox.server.cli", kind="server"
    )


def program(module: str, arguments: Sequence[object], *outputs: int) -> Process | subprocess.Popen[bytes]:
    """Start ``python -m MODULE ARGUMENTS``, which is killed when this process ends in any way.

    Args:
        outputs: descriptors of its output and its errors, or of both.
    """
    words = list(map(str, arguments))
    if not may_start(sys.executable, os.environ, ()):
        return subprocess.Popen([sys.executable, "-m", module, *words], stdout=outputs[0], stderr=outputs[-1])
    return _of_this_process().start([module, *words], os.environ, outputs=outputs, module=module, kind="program")


def run(module: str, arguments: Sequence[object], timeout: float = 200.0) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` for ``python -m MODULE ARGUMENTS``, whose output and errors are captured."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = program(module, arguments, output.fileno(), errors.fileno())
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess([module, *arguments], status, output.read(), errors.read())


def spawned(module: str) -> tuple[Any, ControlPipe]:
    """As `jurybox.processes.spawn`."""
    if not may_start(sys.executable, os.environ, ()):
        return spawn(module)
    return _spawn(_of_this_process(), spawn, module)


def end() -> None:
    """End the nursery of this process, if it has one."""
    if (nursery := _of_tests.pop(os.getpid(), None)) is not None:
        nursery.end()


def _of_this_process() -> Nursery:
    if os.getpid() not in _of_tests:
        _of_tests[os.getpid()] = _nursery()
    return _of_tests[os.getpid()]


def _nursery() -> Nursery:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _make_room(ours)
    one_thread = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
    )  # forks have no more
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**_at_start, **one_thread},
            cwd=Path(__file__).parent.parent,
        )
    return Nursery(process.pid, ours)


def _make_room(asking: socket.socket) -> None:
    asking.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _LARGEST)


# In the nursery.


def main() -> NoReturn:
    asked, parent = int(sys.argv[1]), int(sys.argv[2])
    _end_with(parent, signal.SIGTERM)
    for name in _IMPORTED:
        importlib.import_module(name)
    if len(threads := os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"expected imports that start no thread, which a fork does not have; got {len(threads)}")
    for registered in list(weakref.finalize._registry):  # they take torch's libraries apart, at the end of each process
        registered.atexit = False
    importlib.invalidate_caches()
    gc.collect()
    gc.freeze()
    _run(_forks(asked))


def _forks(fd: int) -> Callable[[], None] | None:
    """Fork what is asked for; return in each child what it should do, and None here once nobody can ask."""
    _LIBC.prctl(_PR_SET_NAME, NAME.encode(), 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked = socket.socket(fileno=fd)
    poll = select.poll()
    poll.register(asked, select.POLLIN)
    told: dict[int, tuple[int, int]] = {}  # by descriptor of a child: its pid, and the pipe for how it ended
    while True:
        for ready, _ in poll.poll():
            if ready != asked.fileno():
                poll.unregister(ready)
                pid, pipe = told.pop(ready)
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(BrokenPipeError):
                    os.write(pipe, str(status).encode())
                os.close(ready)
                os.close(pipe)
                continue
            text, given, _, _ = socket.recv_fds(asked, _LARGEST, 8)
            if not text:
                return None
            request, me = json.loads(text), os.getpid()
            if (pid := os.fork()) == 0:
                asked.detach()
                return functools.partial(_child, request, given[1:], me)
            owner = os.pidfd_open(pid)
            told[owner] = pid, given[0]
            poll.register(owner, select.POLLIN)
            for file in given[1:]:
                os.close(file)
            asked.send(str(pid).encode())


def _child(request: dict[str, Any], files: list[int], parent: int) -> None:
    """Become what was asked for, as a process that was started would be."""
    kind = request["kind"]
    _end_with(parent, signal.SIGTERM if kind == "server" else signal.SIGKILL)
    outputs, files = files[: request["outputs"]], files[request["outputs"] :]
    if outputs:
        os.dup2(outputs[0], 1)
        os.dup2(outputs[-1], 2)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in files:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(number)
    before = _entries(os.environ)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    others = [each for each in sys.path[1:] if each not in before]
    sys.path[:] = ["" if kind == "server" else request["folder"], *_entries(os.environ), *others]
    program, *rest = request["arguments"]
    sys.argv = [program, *map(str, files), *rest]
    sys.modules["numpy"].random.seed()
    if arenas := os.environ.get("MALLOC_ARENA_MAX"):
        _LIBC.mallopt(_M_ARENA_MAX, int(arenas))
    if kind == "server":
        os.setsid()
        atexit.register(_fork_for_the_supervisor().end)
    elif kind == "role":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as `spawn` does
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _LIBC.prctl(_PR_SET_NAME, f"jurybox-{program.rpartition('.')[2]}".encode(), 0, 0, 0)
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _entries(environment: Mapping[str, str]) -> list[str]:
    """The folders of PYTHONPATH, as an interpreter that starts puts them on its path."""
    return [str(Path(each).absolute()) for each in environment.get(_PATH, "").split(os.pathsep) if each]


def _fork_for_the_supervisor() -> Nursery:
    """Let the supervisor of this process take its children from a nursery of its own, forked now, before any thread."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _make_room(ours)
    me = os.getpid()
    if (pid := os.fork()) == 0:
        ours.close()
        _end_with(me, signal.SIGKILL)
        _run(_forks(theirs.detach()))
    theirs.close()
    children = importlib.import_module("jurybox.server.supervisor.children")
    nursery = Nursery(pid, ours)
    children.spawn = functools.partial(_spawn, nursery, children.spawn)
    return nursery


def _spawn(
    nursery: Nursery,
    anew: Callable[..., tuple[Any, ControlPipe]],
    module: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str | None] | None = None,
    *,
    python: str = sys.executable,
) -> tuple[Any, ControlPipe]:
    """As `jurybox.processes.spawn`, which is `anew`."""
    if python != sys.executable:
        return anew(module, arguments, environment, python=python)
    ours, theirs = socket.socketpair()
    set_timeouts(ours, 5)
    variables = {**os.environ, **(environment or {}), _PARENT: str(nursery.pid)}
    given = {name: value for name, value in variables.items() if value is not None}
    with theirs:
        process = nursery.start([module, *arguments], given, [theirs.fileno()], module=module, kind="role")
    return process, ControlPipe(ours.detach())


def _end_with(parent: int, number: int) -> None:
    """Let the kernel signal this process when its parent ends, or end it at once if that has happened."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _run(work: Callable[[], None] | None) -> NoReturn:
    """End this process as the interpreter would, but without taking all those modules apart."""
    if work is None:  # a nursery's end; it owns nothing
        os._exit(0)
    status = 0
    try:
        work()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        if status and not isinstance(left.code, int):
            print(left.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  (whatever it is, it ends this process)
        traceback.print_exc()
        status = 1
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
