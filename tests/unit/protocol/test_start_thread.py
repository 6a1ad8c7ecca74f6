"""Where a process may have no more threads, whoever needs one is told so."""

from __future__ import annotations

import threading

import pytest

from jurybox.protocol.errors import Busy
from jurybox.protocol.threads import start_thread


def test_a_thread_is_started():
    done = threading.Event()
    start_thread(threading.Thread(target=done.set, daemon=True), "for a test")
    assert done.wait(60)


@pytest.mark.parametrize(
    ("error", "why"),
    [(RuntimeError("can't start new thread"), "can't start new thread"), (MemoryError(), "MemoryError")],
)
def test_a_thread_that_cannot_start_is_an_error_with_the_remedy(monkeypatch, error, why):
    def fail(thread):
        raise error

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(Busy) as raised:
        start_thread(threading.Thread(), "for a test")
    assert str(raised.value) == f"no thread for a test ({why}): ask again, or allow more (ulimit -u)"
