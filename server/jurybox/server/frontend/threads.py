"""Threads for what would keep the event loop from others: large requests are parsed there, and pictures decoded."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any

from jurybox.protocol.errors import Busy, said
from jurybox.protocol.threads import start_thread

WORKERS = max(2, os.cpu_count() or 1)


class ThreadPool:
    """The threads of a process that parse large requests and decode pictures.

    Like ThreadPoolExecutor with the loop's run_in_executor, but without the second future, its lock and its callbacks,
    which take a third of the round trip of a single request.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._todo: deque[_Task] = deque()
        self._idle: list[SimpleQueue[_Task]] = []
        self._not_started = WORKERS

    async def run(self, action: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in one of the threads, for the request of this task, and return what it returns or raises.

        Raises:
            Busy: the process has no thread for it, and can start none.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        task = (loop, done, copy_context().run, (action, *arguments))
        with self._lock:
            # The thread that became idle last: each has its own memory, and that of this one is still warm.
            idle = self._idle.pop() if self._idle else None
            if idle is None:
                self._todo.append(task)
                if self._not_started:
                    self._start()
        if idle is not None:
            idle.put(task)
        return await done

    def _start(self) -> None:
        """Start another thread for the newest task, or leave it to those that there are."""
        thread = threading.Thread(target=self._work, name=f"pictures {self._not_started - 1}", daemon=True)
        try:
            start_thread(thread, "for this request")
        except Busy:
            if self._not_started == WORKERS:
                self._todo.pop()
                raise
        else:
            self._not_started -= 1

    def _work(self) -> None:
        own: SimpleQueue[_Task] = SimpleQueue()
        while True:
            with self._lock:
                task = self._todo.popleft() if self._todo else None
                if task is None:
                    self._idle.append(own)
            _do(*(own.get() if task is None else task))
            del task  # release the body and the pictures


_Task = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...]]


def _do(
    loop: asyncio.AbstractEventLoop,
    done: asyncio.Future[Any],
    action: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    if done.cancelled():
        return
    found, failure = None, None
    try:
        found = action(*arguments)
    except BaseException as error:  # noqa: BLE001  the waiting caller must get every error
        failure = RuntimeError(said(error)) if isinstance(error, StopIteration) else error  # futures reject it
    with suppress(RuntimeError):  # the loop was closed
        loop.call_soon_threadsafe(_end, done, found, failure)


def _end(done: asyncio.Future[Any], found: Any, failure: BaseException | None) -> None:
    if done.done():
        return
    if failure is None:
        done.set_result(found)
    else:
        done.set_exception(failure)
