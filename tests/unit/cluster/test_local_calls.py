"""The connection to a worker on the same machine."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from jurybox.cluster.local_calls import RAISED, VALUE, CallConnection, CallServer

SOON = 20.0


def test_answers_arrive_in_order_whichever_is_awaited_first() -> None:
    connection = CallConnection(CallServer(lambda method, arguments: (0, (method, *arguments))).name)
    first, second = connection.ask("step", (1,)), connection.ask("step", (2,))
    assert connection.answer(second, time.monotonic() + SOON) == (0, ("step", 2))
    assert connection.answer(first, time.monotonic() + SOON) == (0, ("step", 1))
    connection.close()


def test_an_answer_that_does_not_come_is_waited_for_no_longer_than_wanted() -> None:
    let_go = threading.Event()
    connection = CallConnection(CallServer(lambda method, arguments: (0, let_go.wait(SOON))).name)
    asked = connection.ask("wait", ())
    assert connection.answer(asked, time.monotonic() + 0.05) is None
    let_go.set()
    assert connection.answer(asked, time.monotonic() + SOON) == (0, True), "it comes later"
    connection.close()


def test_a_worker_listens_again_when_its_caller_has_gone() -> None:
    server = CallServer(lambda method, arguments: (0, method))
    for _ in range(2):
        connection = CallConnection(server.name)
        assert connection.answer(connection.ask("hello", ()), time.monotonic() + SOON) == (0, "hello")
        connection.close()


def test_an_answer_that_cannot_be_sent_is_an_error_and_the_connection_stays() -> None:
    values = {"function": lambda: 3, "lock": threading.Lock()}
    connection = CallConnection(CallServer(lambda method, arguments: (VALUE, values[method])).name)

    def asked(method: str, *arguments):
        return connection.answer(connection.ask(method, arguments), time.monotonic() + SOON)

    kind, function = asked("function")
    assert kind == VALUE and function() == 3, "as through Ray"
    kind, why = asked("lock")
    assert kind == RAISED and "cannot pickle" in why
    with pytest.raises(TypeError):
        connection.ask("function", (threading.Lock(),))
    kind, function = asked("function")
    assert kind == VALUE and function() == 3, "the numbers of calls and answers still agree"
    connection.close()


WORKER = """
import os, time
from jurybox.cluster.local_calls import CallServer
print(CallServer(lambda method, arguments: os._exit(9)).name, flush=True)
time.sleep(60)
"""


def test_the_end_of_a_worker_is_noticed() -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        connection = CallConnection(worker.stdout.readline().strip())
        asked = connection.ask("exit", ())
        with pytest.raises((EOFError, OSError)):
            connection.answer(asked, time.monotonic() + SOON)
        assert worker.wait(SOON) == 9
        later = connection.ask("exit", ())
        with pytest.raises((EOFError, OSError)):
            connection.answer(later, time.monotonic() + SOON)
        connection.close()
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()


@pytest.mark.parametrize("name", ["", "jurybox-env-nobody"])
def test_there_is_no_connection_without_a_server(name) -> None:
    with pytest.raises(OSError):
        CallConnection(name)
