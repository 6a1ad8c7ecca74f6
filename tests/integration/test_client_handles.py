"""Connections, models, tickets and rows that are lost, refused or late: nothing hangs or answers wrongly."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest
from tests.descriptors import open_files
from tests.serving import serving, wait_until

from jurybox.client import Busy, ModelFailed, Refused, ServerGone, SpecMismatch, Timeout, connect
from jurybox.client.local_link import LocalLink
from jurybox.protocol.errors import Error, TooManyFiles

X = np.arange(8, dtype=np.float32).reshape(2, 4)


def lanes(server) -> int:
    with server.connect() as client:
        return client.status()["lanes"]["in_use"]


@contextlib.contextmanager
def stopped_engine(client):
    """Nothing is answered within the block."""
    engine = client.status()["engines"][0]["pid"]
    os.kill(engine, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(engine, signal.SIGCONT)


def test_a_ticket_is_a_future(client):
    ticket = client.model("affine", rows=4).submit(X)
    wait_until(ticket.done)
    reply = ticket.result()
    np.testing.assert_array_equal(reply.outputs, 2 * X + 1)
    assert ticket.result() is reply, "a second call returns the same"
    assert not ticket.cancel() and not ticket.cancelled()


def test_an_awaited_answer_comes_when_it_arrives_and_not_with_the_next_look(client, monkeypatch):
    monkeypatch.setattr("jurybox.client.ticket.LOOK_AFTER", 3600.0)
    model = client.model("moody", rows=4)
    for rows in (2, 12):  # one batch, and pieces
        x = np.full((rows, 4), 50_000, np.float32)
        np.testing.assert_array_equal(asyncio.run(model.infer_async(x, timeout=60)), x + 1)


def test_a_timed_out_ticket_keeps_its_rows_and_returns_its_own_answer_later(client):
    model = client.model("moody", rows=4)
    slow = np.full((2, 4), 100_000, np.float32)
    with stopped_engine(client):
        ticket = model.submit(slow, timeout=60)
        with pytest.raises(Timeout):
            ticket.result(timeout=0.05)
    other = model.submit(np.full((2, 4), 7, np.float32))
    np.testing.assert_array_equal(other.result(timeout=30).outputs, np.full((2, 4), 8, np.float32))
    with contextlib.suppress(Busy), model.rows(2) as rows:  # other use of rows meanwhile
        rows.inputs["observation"][:] = 99
        rows.infer(timeout=30)
    np.testing.assert_array_equal(ticket.result(timeout=30).outputs, slow + 1)


def test_a_cancelled_ticket_returns_its_rows_after_the_engine_is_done_with_them(client):
    model = client.model("moody", rows=2)
    with stopped_engine(client):
        ticket = model.submit(X + 7, timeout=60)
        assert ticket.cancel() and ticket.cancelled() and ticket.done()
        with pytest.raises(CancelledError):
            ticket.result()
        with pytest.raises(Busy):
            model.submit(X)
    np.testing.assert_array_equal(model.infer(X, timeout=30), X + 1)  # this waits for them


def test_an_unreferenced_ticket_returns_its_rows_but_not_before_the_engine_is_done(client):
    model = client.model("moody", rows=2)
    with stopped_engine(client):
        model.submit(X + 7, timeout=60)
        with pytest.raises(Busy):
            model.submit(X)
    wait_until(lambda: fits(model), 30, "the return of its rows")
    ticket = model.submit(X)
    wait_until(ticket.done)
    del ticket  # answered, and not collected
    np.testing.assert_array_equal(model.submit(X).result(30).outputs, X + 1)


def fits(model) -> bool:
    try:
        model.submit(X).result(30)
    except Busy:
        return False
    return True


async def test_a_ticket_can_be_awaited(client):
    model = client.model("affine", rows=8)
    tickets = [model.submit(X + i) for i in range(4)]
    for i, reply in enumerate(await asyncio.gather(*tickets)):
        np.testing.assert_array_equal(reply.outputs, 2 * (X + i) + 1)


async def test_infer_async_returns_the_same_as_infer(leased, client):
    model = client.model("affine")
    x = np.random.default_rng(1).standard_normal((100, 4)).astype(np.float32)
    np.testing.assert_array_equal(await model.infer_async(x[:3]), 2 * x[:3] + 1)  # more than a fresh lane has
    np.testing.assert_array_equal(await model.infer_async(x), 2 * x + 1)  # more than a batch
    assert (await model.infer_async(x[:0])).shape == (0, 4)


async def test_an_event_loop_runs_while_another_thread_uses_the_model(client):
    model = client.model("moody", rows=4)
    with stopped_engine(client):
        slow = threading.Thread(target=model.infer, args=(np.zeros((2, 4), np.float32),), kwargs={"timeout": 60})
        slow.start()
        wait_until(lambda: model.requests.lane.free <= 2, 30, "the thread's request")
        answer = asyncio.ensure_future(model.infer_async(X, timeout=60))
        for _ in range(50):  # a loop that is blocked would never let the engine continue
            await asyncio.sleep(0)
        assert not answer.done()
    np.testing.assert_array_equal(await answer, X + 1)
    slow.join()


def test_threads_with_and_without_event_loops_share_a_model(client):
    model, wrong = client.model("affine", rows=16), []

    async def ask_async(i):
        for turn in range(20):
            x = np.full((2, 4), 100 * i + turn, np.float32)
            if not np.array_equal(await model.infer_async(x, timeout=60), 2 * x + 1):
                wrong.append(x)

    def ask(i):
        for turn in range(20):
            x = np.full((3, 4), 100 * i + turn, np.float32)
            if not np.array_equal(model.infer(x), 2 * x + 1) or not np.array_equal(model(x[0]), 2 * x[0] + 1):
                wrong.append(x)

    works = [lambda i=i: asyncio.run(ask_async(i)) for i in range(2)] + [lambda i=i: ask(i) for i in range(2, 4)]
    failures = []

    def run(work):
        try:
            work()
        except BaseException as error:  # noqa: BLE001  the test reports it
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and not wrong


@pytest.mark.parametrize("timeout", [float("inf"), 1e300, 10**30])
def test_an_infinite_time_out_is_accepted(client, timeout):
    model = client.model("affine", rows=4)
    np.testing.assert_array_equal(model.infer(X, timeout=timeout), 2 * X + 1)
    np.testing.assert_array_equal(model(X[0], timeout=timeout), 2 * X[0] + 1)
    np.testing.assert_array_equal(model.submit(X, timeout=timeout).result(timeout=timeout).outputs, 2 * X + 1)
    np.testing.assert_array_equal(asyncio.run(model.infer_async(X, timeout=timeout)), 2 * X + 1)


def test_a_nan_time_out_is_refused_and_a_negative_one_has_expired(client):
    model = client.model("affine", rows=4)
    with pytest.raises(ValueError, match="timeout=nan: expected seconds"):
        model.infer(X, timeout=float("nan"))
    with pytest.raises(Timeout):
        model.infer(X, timeout=-1)
    np.testing.assert_array_equal(model.infer(X), 2 * X + 1)
    with pytest.raises(ValueError, match="timeout"):
        connect(client.address, timeout=float("nan"))


def test_the_error_of_a_batch_instead_of_a_row_says_what_to_do(client):
    model = client.model("affine")
    with pytest.raises(SpecMismatch, match=r"one row, float32 of shape \(4,\), came float32 of shape \(2, 4\).*infer"):
        model(X)
    with pytest.raises(SpecMismatch, match=r"came float64 of shape \(4,\).*astype"):
        model(X[0].astype(np.float64))


LOST = """
import gc, os, sys, threading, numpy
from jurybox.client import connect
address, transport, *ways = sys.argv[1:]
x = numpy.ones((2, 4), "f4")
def ask():
    server = connect(address, transport=transport, timeout=60)
    model = server.model("affine", rows=4)
    model.infer(x)
    return server, model, model.submit(x)
for how in ways:
    if how == "dropped":
        for _ in range(3):
            held = ask()
            held = None
            gc.collect()
    elif how == "cycle":
        for _ in range(3):
            held = [ask()]
            held.append(held)
            held = None
            gc.collect()
    elif how == "thread":
        here = [ask()]
        thread = threading.Thread(target=lambda: (here.clear(), gc.collect()))
        thread.start()
        thread.join()
    elif how == "exit":
        held = ask()
    elif how == "exception":
        try:
            held = ask()
            raise RuntimeError
        except RuntimeError:
            pass
        del held
    elif how == "fork":
        held = ask()
        child = os.fork()
        held = None
        gc.collect()
        if child:
            assert os.waitpid(child, 0)[1] == 0
            print("fork", flush=True)
        continue
    print(how, flush=True)
"""


@pytest.mark.parametrize("ways", [("dropped", "cycle", "thread", "exception", "exit"), ("fork",)], ids=["lost", "fork"])
def test_a_connection_lost_without_close_hangs_no_process(server, gateway_server, transport, ways):
    address = server.address
    if transport in ("tcp", "grpc"):
        address = f"{transport}://{(gateway_server if transport == 'grpc' else server).listening(transport)}"
    if transport == "grpc" and "fork" in ways:
        pytest.skip("gRPC does not survive a fork")
    over = transport if transport in ("shm", "zmq") else "auto"
    done = subprocess.run(
        # From Python 3.12 on a fork beside threads warns.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", LOST, address, over, *ways],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(ways) and not done.stderr


def test_dropped_connections_and_models_leave_no_files_and_no_lanes(leased, connecting, server):
    wait_until(lambda: lanes(server) == 0, 30, "no lanes in use")
    connecting().model("affine").infer(X)
    gc.collect()
    before = open_files()
    for _ in range(5):
        connection = connecting()
        for _ in range(4):
            connection.model("affine", rows=2).infer(X)
        assert not connection._requests
        del connection
    gc.collect()
    wait_until(lambda: open_files() <= before, 20, "no more files than before")
    wait_until(lambda: lanes(server) == 0, 30, "the return of every lane")


def test_refused_models_keep_no_lane(server, monkeypatch):
    def refuses(*_):
        raise Refused("no")

    with server.connect() as client:
        lanes_before, files_before = lanes(server), open_files()
        with monkeypatch.context() as broken:
            broken.setattr(LocalLink, "_open_transport", refuses)
            for _ in range(5):
                with pytest.raises(Refused):
                    client.model("affine", rows=32)
        assert lanes(server) == lanes_before and open_files() == files_before
        np.testing.assert_array_equal(client.model("affine", rows=32).infer(X), 2 * X + 1)


def test_a_connection_that_cannot_be_made_leaves_nothing(tmp_path):
    with pytest.raises(ServerGone):
        connect(f"ipc://{tmp_path}/nobody", timeout=0.1)
    gc.collect()
    before = open_files()
    for _ in range(3):
        for address in (f"ipc://{tmp_path}/nobody", "tcp://127.0.0.1:9"):
            with pytest.raises(ServerGone):
                connect(address, timeout=0.1)
    assert open_files() == before


@pytest.mark.parametrize("transport", ["tcp"])
def test_the_error_of_a_remote_client_out_of_files_says_what_to_do(connecting):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connecting() as connection:
        connection.model("affine", rows=1).close()
        held = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + 24, hard))
            with pytest.raises(TooManyFiles, match="raise the limit"):
                for _ in range(40):
                    held.append(connection.model("affine", rows=1))
            with pytest.raises(TooManyFiles, match="raise the limit"):
                connecting()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for model in held:
            np.testing.assert_array_equal(model(X[0]), 2 * X[0] + 1)
        assert connection.model("affine", rows=1)


def test_closing_a_connection_in_use_by_another_thread_times_out_first(server):
    with server.connect() as client:
        busy, idle = client.model("affine", rows=2), client.model("affine", rows=2)
        answers = []
        thread = threading.Thread(target=lambda: answers.append(busy.infer(X, timeout=60)))
        with stopped_engine(client):
            thread.start()
            wait_until(lambda: bool(busy.requests.lane.in_flight))
            client.timeout = busy.requests.turns.timeout = 0.3
            with pytest.raises(Timeout, match="another thread's call of 'affine'"):
                client.close()
            with pytest.raises(Refused, match="closed"):
                idle.infer(X)
        thread.join(60)
        np.testing.assert_array_equal(answers[0], 2 * X + 1)
    with pytest.raises(Refused, match="closed"):
        busy.infer(X)


def test_two_models_of_one_connection_both_find_the_next_server(tmp_path):
    folder = tmp_path / "server"
    models = {name: {"factory": "tests.models:affine"} for name in ("one", "two")}
    with serving(folder, models) as server:
        connection = server.connect()
        pair = [connection.model(name, rows=4) for name in models]
        tickets = [model.submit(X) for model in pair]
        for model in pair:
            model.infer(X)
    with serving(folder, models):
        for model, ticket in zip(pair, tickets, strict=True):
            for ask in (model.infer, model):
                with contextlib.suppress(ServerGone):
                    ask(X if ask == model.infer else X[0], timeout=30)
            np.testing.assert_array_equal(model.infer(X, timeout=30), 2 * X + 1)
            with contextlib.suppress(Error):
                np.testing.assert_array_equal(ticket.result(1).outputs, 2 * X + 1)
        connection.close()


def test_an_error_cut_inside_a_character_is_raised_and_loses_no_rows(client):
    model = client.model("moody", rows=2)
    for shift in range(4):
        with pytest.raises(ModelFailed, match="RuntimeError"):
            model.infer(np.full((2, 4), 700 + shift, np.float32))
        with pytest.raises(ModelFailed, match="RuntimeError"):
            model(np.full(4, 700 + shift, np.float32))
        with pytest.raises(ModelFailed, match="RuntimeError"):
            model.submit(np.full((2, 4), 700 + shift, np.float32)).result()
    np.testing.assert_array_equal(model.infer(X), X + 1)


ENDS = """
import builtins, mmap, os, threading, time
import numpy as np
from jurybox import native

rings = native.ShmRingsClient(np.frombuffer(mmap.mmap(-1, native.RINGS_BYTES), np.uint8), 0, 1, os.eventfd(0), 0)

def watch(watch=rings.watch, told=os.eventfd(0)):
    while True:
        watch(told, 0.1)

class Late:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)  # other threads run, while the interpreter ends

threading.Thread(target=watch, daemon=True).start()
builtins.late = Late()
print("done", flush=True)
"""


def test_a_program_that_ends_while_a_thread_watches_for_answers_is_not_aborted():
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
