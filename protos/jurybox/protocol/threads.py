"""Threads where a process may have no more: it has as many as it may, or no memory for the stack of another one."""

from __future__ import annotations

import threading

from jurybox.protocol.errors import Busy, plain


def start_thread(thread: threading.Thread, what: str) -> None:
    """Start a thread.

    Args:
        thread: the thread.
        what: what it is for; the message begins with "no thread" and this.

    Raises:
        Busy: the process can have no more for now.
    """
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        why = plain(error) or type(error).__name__
        raise Busy(f"no thread {what} ({why}): ask again, or allow more (ulimit -u)") from error
