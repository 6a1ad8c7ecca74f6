"""Signals to a supervisor: bytes while it runs, nothing once it has ended."""

from __future__ import annotations

import os
import signal

import pytest

from jurybox.server.supervisor.run import _Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_when_all_is_stopped_does_not_replace_the_status(number):
    with _Signals() as signals:
        os.kill(os.getpid(), number)
        assert signals.socket.recv(1) == bytes([number])
    os.kill(os.getpid(), number)  # it would end this process, or raise KeyboardInterrupt
    assert {signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)} == {signal.SIG_IGN}
