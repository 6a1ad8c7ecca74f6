"""Our client over grpc://: entered again by destructors and handlers, interrupted, dropped."""

from __future__ import annotations

import _thread
import gc
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.collecting import collecting_often
from tests.moments import Moment, each_moment
from tests.serving import wait_until

from jurybox import native
from jurybox.client import ProtocolMismatch, Refused, RowFailed, Timeout, connect
from jurybox.client.remote import grpc_channel, grpc_stream, weights
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.locks import is_serving

ROW = np.array([[1, 2, 3, 4]], np.float32)
ANSWER = [[3, 5, 7, 9]]


@pytest.fixture(params=["http2", "grpcio"])
def calls(request, monkeypatch):
    """What makes the calls of connections made in this test."""
    if request.param == "grpcio":
        monkeypatch.setattr("jurybox.client.remote.grpc_link.can_dial", lambda address, authority: False)
    elif native.nghttp2()[1]:
        pytest.skip("the system has no libnghttp2")
    return request.param


@pytest.fixture
def address(gateway, calls):
    return f"grpc://{gateway.grpc}"


@pytest.fixture
def server(address):
    with connect(address, timeout=30) as server:
        yield server


class Dropped:
    """Does something in a destructor, which only the garbage collector calls."""

    def __init__(self, action):
        self.me, self.action = self, action

    def __del__(self):
        self.action()


@pytest.mark.parametrize("way", ["infer", "submit"])
def test_a_destructor_is_answered_or_refused_at_once_in_whichever_thread_the_collector_runs_it(server, way, calls):
    mine, other = server.model("affine"), server.model("affine")
    ask = {"infer": mine.infer, "submit": lambda rows: mine.submit(rows).result().outputs}[way]
    wrong, slow, threads, done = [], [], set(), []

    def collected():
        began = time.monotonic()
        try:
            if other.infer(ROW).tolist() != ANSWER:
                wrong.append("another row's answer")
            np.asarray(ask(ROW))
        except Refused as error:
            if "a destructor was run by the garbage collector" not in str(error):
                wrong.append(str(error))
        except Exception as error:  # noqa: BLE001
            wrong.append(repr(error))
        threads.add(threading.get_ident())
        done.append(1)
        if time.monotonic() - began > 20:
            slow.append(time.monotonic() - began)

    other.infer(ROW)
    ask(ROW)
    with collecting_often():
        others = calls == "grpcio" and way == "submit"  # the client has a thread of its own
        wait_until(
            lambda: [Dropped(collected), ask(ROW)] and len(done) > 60 and len(threads) > others,
            60,
            what="destructors",
        )
    assert (wrong, slow) == ([], [])


@pytest.mark.parametrize("way", ["call", "weights"])
def test_a_thread_that_grpc_starts_for_us_carries_answers_before_it_runs_a_line(gateway, way, monkeypatch):
    monkeypatch.setattr("jurybox.client.remote.grpc_link.can_dial", lambda address, authority: False)
    began = []

    def called(frame, event, _):
        if event == "call" and frame.f_globals.get("__name__") == "grpc._channel":
            began.append((frame.f_code.co_name, is_serving()))
            sys.setprofile(None)

    threading.setprofile(called)
    try:
        with connect(f"grpc://{gateway.grpc}", timeout=30) as server:
            if way == "call":
                server.model("affine").submit(ROW).result()
            else:
                server.publisher("policy").publish({"scale": np.float32(2), "offset": np.float32(1)})
    finally:
        threading.setprofile(None)
    assert began and all(serving for _, serving in began), began
    assert not is_serving()


def test_a_signal_handler_in_a_call_gets_its_own_answer(server):
    model, other = server.model("affine"), server.model("affine")
    other.infer(ROW)
    inside, wrong = [], []

    def handler(*_):
        try:
            inside.append(other.infer(ROW).tolist() == ANSWER and bool(server.status()))
        except Exception as error:  # noqa: BLE001
            wrong.append(repr(error))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for number in range(60):
            signal.setitimer(signal.ITIMER_REAL, 1e-4 + number * 2e-5)
            assert model.infer(ROW).tolist() == ANSWER
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert wrong == [] and inside and all(inside)


def interrupted(action) -> bool:
    """Call `action` with a KeyboardInterrupt at a random moment; return whether it fell inside."""
    inside = True
    try:
        signal.setitimer(signal.ITIMER_REAL, np.random.uniform(1e-5, 3e-3))
        action()
        inside = False
        time.sleep(1)
    except KeyboardInterrupt:
        return inside
    return False  # a destructor that ran just then has swallowed it


def test_ctrl_c_in_a_call_leaves_a_connection_that_other_threads_can_use(server):
    model = server.model("affine")
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        assert sum(interrupted(lambda: [model.infer(ROW), server.models()]) for _ in range(100)) > 10
    finally:
        signal.signal(signal.SIGALRM, before)
    answers = []
    thread = threading.Thread(target=lambda: answers.append([server.models(), model.infer(ROW).tolist()]))
    thread.start()
    thread.join(20)
    assert answers and answers[0][1] == ANSWER

    def whole():
        model.infer(ROW)
        model.requests.give_up_kept()
        return model.room() == model.requests.lane.rows

    wait_until(whole, what="the rows of interrupted calls")


@pytest.mark.parametrize("end", ["close", "drop"])
@pytest.mark.parametrize("way", ["infer", "submit"])
def test_a_connection_leaves_no_thread(address, way, end):
    def use():
        server = connect(address, timeout=30)
        model = server.model("affine")
        model.infer(ROW) if way == "infer" else model.submit(ROW).result()
        if end == "close":
            server.close()

    def threads():
        gc.collect()
        return len(list(Path("/proc/self/task").iterdir()))

    use()
    before = threads()  # gRPC's core has some, for all connections
    for _ in range(8):
        use()
    wait_until(lambda: threads() < before + 4, what="the end of the connections' threads")


@pytest.mark.parametrize("end", ["close", "drop"])
def test_weights_leave_no_thread(server, end):
    def use():
        reader, publisher = server.weights("policy"), server.publisher("policy")
        if end == "close":
            reader.close()
            publisher.close()

    def threads():
        gc.collect()
        return len(list(Path("/proc/self/task").iterdir()))

    use()
    before = threads()
    for _ in range(4):
        use()
    wait_until(lambda: threads() < before + 4, what="the end of the streams' threads")


def test_a_thread_of_ours_is_started_only_for_tickets_of_grpcio(server, calls):
    model, started = server.model("affine"), []
    with pytest.MonkeyPatch.context() as patched:
        for name in ("start_new_thread", "start_joinable_thread"):
            if start := getattr(_thread, name, None):
                patched.setattr(
                    _thread, name, lambda *call, start=start, **more: started.append(call) or start(*call, **more)
                )
        model.infer(ROW)
        assert not started
        model.submit(ROW).result()
        assert any("_start_calls" in str(call) for call in started) == (calls == "grpcio")


def test_calls_at_the_same_time_take_a_channel_each_and_keep_their_time_outs(server, gateway, calls):
    models = [server.model("team/moody") for _ in range(4)]
    engine = gateway.server.pids()["engine-0"]
    with ThreadPoolExecutor(3) as pool:
        os.kill(engine, signal.SIGSTOP)
        try:
            others = [pool.submit(model.infer, ROW, timeout=60) for model in models[1:]]
            with pytest.raises(Timeout):
                models[0].infer(ROW, timeout=0.1)
            assert "affine" in server.models()
            assert not any(other.done() for other in others), "it waited for none of them"
        finally:
            os.kill(engine, signal.SIGCONT)
        for other in others:
            np.testing.assert_array_equal(other.result(60), ROW + 1)
    kept = server._link._channels if calls == "grpcio" else server._link._infer
    assert 1 <= len(kept._free) <= 5, "they are kept for the next calls"


def test_a_call_of_a_closed_connection_is_refused(server):
    server.close()
    with pytest.raises(Refused, match="closed"):
        server._link._channels.call("ServerLive", pb.ServerLiveRequest(), 1.0)


@pytest.mark.parametrize("end", ["publisher", "reader"])
def test_a_handler_at_any_place_of_a_transfer_of_weights_is_answered_or_refused(server, end):
    publisher, reader = server.publisher("policy"), server.weights("policy")
    arrays = {"scale": np.float32(2), "offset": np.float32(1)}
    publisher.publish(arrays)
    came = []

    def handler():
        try:
            publisher.publish(arrays) if end == "publisher" else reader.read()
            came.append("made")
        except Refused as error:
            assert "a transfer of the weights of 'policy' is under way in this thread" in str(error)
            came.append("refused")

    files = (weights.__file__, grpc_channel.__file__, grpc_stream.__file__)
    try:
        for moment in each_moment(files, handler, 3):
            with moment:
                version = publisher.publish(arrays)
                state, seen, _ = reader.read()
            assert seen >= version and state["scale"] == 2
        assert "refused" in came and "made" in came
    finally:
        publisher.close()
        reader.close()


def test_a_publisher_closed_in_a_handler_of_its_publication_is_closed_at_its_end(server):
    arrays = {"scale": np.float32(2), "offset": np.float32(1)}
    for number in range(0, 10_000, 5):
        publisher = server.publisher("policy")
        with Moment((weights.__file__,), number, publisher.close) as moment:
            try:
                assert publisher.publish(arrays) > 0
            except Refused as error:
                assert "was closed" in str(error)
        if not moment.fell:
            break
        with pytest.raises(Refused, match="was closed"):
            publisher.publish(arrays)
    publisher.close()
    assert number > 10


def test_failed_rows_are_named_and_the_others_answered_in_one_call_and_in_a_tickets(server):
    model = server.model("picky")
    rows = np.array([[1], [3], [5], [3]], np.float32)  # threes fail
    asked = []
    ask_bytes = server._link._infer.ask
    server._link._infer.ask = lambda *call: asked.append(call) or ask_bytes(*call)
    good = model.infer(rows[::2])
    for ask in (lambda: model.infer(rows), lambda: model.submit(rows).result()):
        with pytest.raises(RowFailed) as caught:
            ask()
        assert sorted(caught.value.errors) == [1, 3]
        np.testing.assert_array_equal(np.asarray(caught.value.outputs)[::2], good)
    assert len(asked) == 2  # each infer is one call, also that of which rows failed


@pytest.mark.parametrize("change", [lambda answer: b"\xff\xff", lambda answer: b"", lambda answer: answer[:-1]])
def test_an_answer_that_cannot_be_read_is_an_error_and_the_next_one_is_read(server, monkeypatch, change):
    model, infer = server.model("affine"), type(server._link._infer)
    ask = infer.ask
    for _ in range(2):  # the first is parsed, the second has the form of the first
        assert model.infer(ROW).tolist() == ANSWER
        with monkeypatch.context() as patched:
            patched.setattr(infer, "ask", lambda *given, **more: change(ask(*given, **more)))
            with pytest.raises(ProtocolMismatch, match="answer cannot be read"):
                model.infer(ROW)
    assert model.infer(ROW).tolist() == ANSWER
