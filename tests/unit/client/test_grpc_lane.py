"""A lane's transport over gRPC: what its calls say, and what it takes for an answer."""

from __future__ import annotations

import json
import re
import threading
import time
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from jurybox.client.in_flight import InFlight
from jurybox.client.link import RowsHere
from jurybox.client.remote.grpc_transport import GrpcTransport
from jurybox.client.remote.grpcio_calls import GrpcioStarted
from jurybox.client.transports.transport import NOT_FIT, NOT_SENT, RowPlace
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.arena import LOAD, STORE
from jurybox.protocol.errors import Code, Refused
from jurybox.protocol.locks import mark_serving
from jurybox.protocol.scoreboard import FIRST, NORMAL

NUMBER, ROW = TensorSpec("float32"), TensorSpec("float32", (2,))
RAGGED, TEXT = TensorSpec("float32", (-1, 2), capacity=8), TensorSpec("bytes", capacity=8)
PLAIN = ModelSpec("m", {"x": ROW}, {"y": ROW})
OPEN = ModelSpec("m", {"x": RAGGED, "t": TEXT}, {"y": RAGGED, "t": TEXT})
STATEFUL = ModelSpec("m", {"x": NUMBER}, {"y": NUMBER}, state={"total": NUMBER})


class Calls:
    """Answers each call with what `answers` has, and keeps what was asked; `start` keeps who is to be told."""

    def __init__(self):
        self.asked, self.answers, self.told = [], [], []

    def ask(self, request, seconds):
        self.asked.append((pb.ModelInferRequest.FromString(request), seconds))
        if not self.answers:
            raise Refused("it is closed")
        if isinstance(answer := self.answers.pop(), Exception):
            raise answer
        return answer

    def started(self):
        return GrpcioStarted(self)

    def start(self, request, seconds, done):
        self.asked.append((pb.ModelInferRequest.FromString(request), seconds))
        self.told.append(done)


class Failure(grpc.RpcError):
    def __init__(self, code, said):
        self.code, self.details, self.trailing_metadata = lambda: code, lambda: said, tuple


def made(spec, **more):
    calls, rows = Calls(), RowsHere(spec, 4)
    return GrpcTransport(calls, spec, rows, **more), calls, rows.columns


def ticket(sequence=5, rows=2, version=0, left=10**10):
    one = InFlight(sequence, 1, rows, 0, version)
    one.submitted = time.monotonic_ns()
    one.deadline, one.incarnation = one.submitted + left, 3
    return one


def response(outputs, version="6", shapes=None, extents=None, **parameters):
    answer = pb.ModelInferResponse(model_name="m", model_version=version)
    for name, raw in outputs.items():
        one = answer.outputs.add(name=name, datatype="FP32", shape=(shapes or {}).get(name, ()))
        if extents and name in extents:
            one.parameters["extents"].string_param = extents[name]
        answer.raw_output_contents.append(raw)
    for name, value in parameters.items():
        answer.parameters[name].string_param = value
    return answer.SerializeToString()


FOUR = np.arange(4, dtype=np.float32).tobytes()


@pytest.mark.parametrize("version", ["6", "", "six", "٦", "9" * 20, "9" * 19])
def test_an_answer_is_written_to_its_rows_and_names_its_version_if_it_has_one(version):
    transport, calls, columns = made(PLAIN)
    number = int(version) if version in ("6", "9" * 19) else 0
    for _ in range(2):  # the form of the second answer is known
        columns.outputs["y"][:] = 0
        calls.answers = [response({"y": FOUR}, version)]
        assert transport.exchange(ticket(), 1.0) == (5, Code.OK, "", number, 3)
        assert columns.outputs["y"].tolist() == [[0, 0], [0, 1], [2, 3], [0, 0]]


def test_a_request_says_what_its_lane_wants_to_be_told():
    for spec, priority in ((PLAIN, NORMAL), (OPEN, FIRST)):
        transport, calls, _ = made(spec, priority=priority)
        transport.send(ticket(version=7))
        ((asked, seconds),) = calls.asked
        assert asked.model_name == "m" and asked.model_version == "7" and seconds == pytest.approx(10.0)
        assert asked.parameters["row_errors"].bool_param
        assert ("extents" in asked.parameters) == (spec is OPEN) == ("priority" in asked.parameters)
        assert spec is PLAIN or asked.parameters["priority"].int64_param == FIRST


def test_rows_of_any_size_go_out_with_their_sizes():
    transport, calls, columns = made(OPEN)
    columns.inputs["x"][1:3] = np.arange(16).reshape(2, 8)
    columns.input_extents["t"][1:3], columns.inputs["t"][1:3, :2] = [[2], [1]], [[65, 66], [67, 0]]
    for sizes in ([[2], [1]], [[2], [2]]):
        columns.input_extents["x"][1:3] = sizes
        transport.send(ticket())
        x, t = calls.asked[-1][0].inputs
        raw_x, raw_t = calls.asked[-1][0].raw_input_contents
        same = sizes[0] == sizes[1]
        assert list(x.shape) == ([2, 2, 2] if same else [6]) and ("extents" in x.parameters) == (not same)
        assert np.frombuffer(raw_x, np.float32).tolist() == [0, 1, 2, 3, 8, 9, 10, 11][: 8 if same else 6]
        assert (t.datatype, list(t.shape)) == ("BYTES", [2]) and raw_t == b"\2\0\0\0AB\1\0\0\0C"


def test_a_row_whose_size_another_process_has_overwritten_is_refused_without_a_call():
    transport, calls, columns = made(OPEN)
    columns.input_extents["x"][1:3] = [[2], [5]]
    transport.send(sent := ticket())
    assert transport.holds(sent) and not calls.asked
    (answer,) = transport.receive(0)
    assert answer.code == Code.SPEC_MISMATCH and "input 'x'" in answer.message
    transport.settled(answer)
    assert not transport.receive(0) and not transport.holds(sent)


def test_sessions_are_named_with_their_steps_and_their_state_is_read_and_written_by_itself():
    transport, calls, columns = made(STATEFUL)
    columns.sessions["slot"], columns.sessions["step"], columns.inputs["x"][:] = [0, 1, 2, 3], [9, 8, 7, 6], 5
    columns.state_in["total"][:] = [1, 2, 3, 4]
    told = {}
    for flags in (0, STORE, LOAD):
        columns.sessions["flags"] = flags
        transport.send(ticket())
        asked, _ = calls.asked[-1]
        told[flags] = (asked.parameters["session_state"].string_param, [one.name for one in asked.inputs])
        assert asked.parameters["sessions"].string_param == "1:8;2:7"
        client = asked.parameters["session_client"].string_param
        if flags != STORE:
            values = np.frombuffer(asked.raw_input_contents[0], np.float32).tolist()
            assert values == ([5, 5] if not flags else [2, 3])
    assert told == {0: ("", ["x"]), STORE: ("get", []), LOAD: ("set", ["total"])}
    assert len(client) == 32 and made(STATEFUL)[0]._client != client, "no other lane has its sessions"
    transport.end_sessions()  # the gateway may be gone
    asked, _ = calls.asked[-1]
    assert (asked.parameters["session_client"].string_param, asked.parameters["sessions"].string_param) == (client, "")
    transport, calls, _ = made(PLAIN)
    transport.end_sessions()
    assert not calls.asked


def test_state_that_was_read_is_written_beside_the_outputs_and_what_was_set_has_none():
    transport, calls, columns = made(STATEFUL)
    columns.sessions["flags"], two = STORE, np.array([7, 8], np.float32).tobytes()
    calls.answers = [response({"total": two})]
    assert transport.exchange(ticket(), 1.0).code == Code.OK
    assert columns.state_out["total"].tolist() == [0, 7, 8, 0] and not columns.outputs["y"].any()
    columns.sessions["flags"] = LOAD
    calls.answers = [response({})]
    assert transport.exchange(ticket(), 1.0).code == Code.OK


@pytest.mark.parametrize("left", [0, -1])
def test_a_ticket_whose_time_had_passed_is_not_sent(left):
    transport, calls, _ = made(PLAIN)
    answer = transport.exchange(ticket(left=left), 1.0)
    assert answer.code == Code.TIMEOUT and "had passed before it was sent" in answer.message and not calls.asked


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (Refused("it is closed", Code.NOT_READY), Code.NOT_READY, "^it is closed$"),
        (Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "in 1 s"), Code.TIMEOUT, r"^model 'm' did not answer in time \(in"),
        (Failure(grpc.StatusCode.UNAVAILABLE, "it is gone"), Code.SERVER_GONE, "^it is gone$"),
    ],
)
def test_a_call_that_failed_has_the_code_and_the_words_of_its_error(error, code, said):
    transport, calls, _ = made(PLAIN)
    calls.answers = [error]
    answer = transport.exchange(ticket(), 1.0)
    assert answer.code == code and re.search(said, answer.message)


@pytest.mark.parametrize(
    ("spec", "answer", "said"),
    [
        (PLAIN, b"\xff", "cannot be read"),
        (PLAIN, response({}), "output 'y' is missing"),
        (PLAIN, response({"y": FOUR[1:]}), "output 'y': 16 raw bytes were expected, came 15"),
        (PLAIN, response({"y": FOUR}, row_errors='{"2": "no"}'), "row_errors has an index outside the 2 rows"),
        (PLAIN, response({"y": FOUR}, row_errors='{"-1": "no"}'), "row_errors has an index outside the 2 rows"),
        (PLAIN, response({"y": FOUR}, row_errors="no"), "cannot be read"),
        (PLAIN, response({"y": FOUR}, row_errors="[" * 5000), "cannot be read"),
        (PLAIN, response({"y": FOUR}, session_lost="0,2"), "session_lost has an index outside the 2 rows"),
        (OPEN, response({"y": FOUR, "t": b""}, shapes={"y": (3, 1, 2)}), "2 rows of .* were expected, came shape"),
        (OPEN, response({"y": FOUR, "t": b""}, shapes={"y": (2, 5, 2)}), "2 rows of .* were expected, came shape"),
        (OPEN, response({"y": FOUR, "t": b""}, shapes={"y": (2, -1, 2)}), "2 rows of .* were expected, came shape"),
        (OPEN, response({"y": FOUR, "t": b""}, shapes={"y": ()}), "2 rows of .* were expected, came shape"),
        (OPEN, response({"y": FOUR, "t": b""}, shapes={"y": (2, 2, 2)}), "sizes are of 2 rows, 8 elements; 4 came"),
        (OPEN, response({"y": FOUR, "t": b""}, extents={"y": "1;1;0"}), "sizes are of 3 rows, 4 elements; 4 came"),
    ],
)
def test_an_answer_that_is_not_as_the_spec_has_it_is_refused_with_words(spec, answer, said):
    transport, calls, columns = made(spec)
    calls.answers = [answer]
    came = transport.exchange(ticket(), 1.0)
    assert came.code == Code.PROTOCOL_MISMATCH and came.message.startswith("the server's answer cannot be read: ")
    assert re.search(said, came.message)
    assert not columns.outputs["y"].any()


@pytest.mark.parametrize(
    ("code", "parameters", "told"),
    [
        (Code.ROW_FAILED, {"row_errors": json.dumps({"1": "it is odd"})}, {1: "it is odd"}),
        (Code.OK, {"row_errors": "{}"}, {}),
        (Code.SESSION_LOST, {"session_lost": "0,1"}, {0: "lost", 1: "lost"}),
        (Code.SESSION_LOST, {"session_lost": ""}, {}),
    ],
)
def test_reasons_of_rows_are_those_of_the_last_answer(code, parameters, told):
    transport, calls, columns = made(PLAIN)
    columns.fail(1, "earlier")
    calls.answers = [response({"y": FOUR}, **parameters)]
    answer = transport.exchange(ticket(), 1.0)
    assert answer.code == code and columns.failures(1, 2) == told
    assert columns.outputs["y"].any() == (code != Code.SESSION_LOST)
    assert answer.version == (0 if code == Code.SESSION_LOST else 6)


def test_outputs_without_elements_have_their_size_too():
    transport, calls, columns = made(OPEN)
    columns.output_extents["y"][:] = 9
    calls.answers = [response({"y": b"", "t": b"\0" * 8}, shapes={"y": (2, 0, 2), "t": (2,)})]
    answer = transport.exchange(ticket(), 1.0)
    assert answer.code == Code.OK, answer.message
    assert columns.output_extents["y"][:, 0].tolist() == [9, 0, 0, 9]


@pytest.mark.parametrize("how", ["extents", "one size"])
def test_outputs_of_any_size_are_written_with_their_sizes(how):
    transport, calls, columns = made(OPEN)
    text = b"\2\0\0\0AB\0\0\0\0"
    if how == "extents":
        calls.answers = [response({"y": FOUR + FOUR[:8], "t": text}, extents={"y": "2;1"}, shapes={"t": (2,)})]
    else:
        calls.answers = [response({"y": FOUR, "t": text}, shapes={"y": (2, 1, 2), "t": (2,)})]
    answer = transport.exchange(ticket(), 1.0)
    assert answer.code == Code.OK, answer.message
    sizes, values = columns.output_extents["y"][:, 0].tolist(), columns.outputs["y"][:, :4].tolist()
    if how == "extents":
        assert sizes == [0, 2, 1, 0] and values == [[0] * 4, [0, 1, 2, 3], [0, 1, 0, 0], [0] * 4]
    else:
        assert sizes == [0, 1, 1, 0] and values == [[0] * 4, [0, 1, 0, 0], [2, 3, 0, 0], [0] * 4]
    assert columns.output_extents["t"][:, 0].tolist() == [0, 2, 0, 0] and bytes(columns.outputs["t"][1, :2]) == b"AB"


def test_an_answer_to_a_call_that_was_made_again_or_that_nobody_awaits_is_dropped():
    transport, calls, columns = made(PLAIN)
    sent = ticket()
    transport.send(sent)
    transport.send(sent)
    first, second = calls.told
    first(Failure(grpc.StatusCode.UNAVAILABLE, "the first"))
    assert not transport.receive(0) and transport.holds(sent)
    second(Failure(grpc.StatusCode.UNAVAILABLE, "the second"))
    for _ in range(2):
        (answer,) = transport.receive(0)
        assert answer.message == "the second"
    transport.settled(answer)
    assert not transport._done and not transport.receive(0) and not transport.holds(sent)
    transport.send(sent)
    transport.close()
    calls.told[-1](Failure(grpc.StatusCode.UNAVAILABLE, "late"))
    assert not transport.receive(0) and not columns.outputs["y"].any() and not transport._done


def test_whoever_waits_gets_the_answer_when_it_comes_and_nothing_after_the_time():
    transport, calls, _ = made(PLAIN)
    transport.send(ticket())
    assert not transport.receive(0.01)
    carrying = threading.Thread(target=lambda: calls.told[0](Failure(grpc.StatusCode.UNAVAILABLE, "no")))
    carrying.start()
    (answer,) = transport.receive(30.0)
    carrying.join(30)
    assert answer.code == Code.SERVER_GONE


def test_a_thread_that_carries_answers_waits_for_none():
    transport, _, _ = made(PLAIN)
    told = []

    def carry():
        mark_serving()
        assert not transport.receive(0)
        with pytest.raises(Refused, match="no answer can be awaited here"):
            transport.receive(1000.0)
        told.append(True)

    thread = threading.Thread(target=carry, daemon=True)
    thread.start()
    thread.join(30)
    assert told == [True]


def place_of(columns, **more):
    place = RowPlace(1, 1, ROW, columns.inputs["x"][1], None, columns.outputs["y"][1])
    return place._replace(**more)


def test_a_callers_row_goes_out_as_it_lies_and_an_answer_of_known_form_comes_back_in_new_arrays():
    transport, calls, columns = made(PLAIN)
    call, row = transport.caller(place_of(columns)), np.array([1, 2], np.float32)
    for value in (3, 4):
        calls.answers = [response({"y": np.full(2, value, np.float32).tobytes()})]
        assert call(row, 5, 1.0).tolist() == [value] * 2 and call.version == 6
    assert columns.outputs["y"][1].tolist() == [3, 3], "only the first was written there"
    assert np.frombuffer(calls.asked[0][0].raw_input_contents[0], np.float32).tolist() == [1, 2]
    calls.answers = [response({"y": np.zeros(2, np.float32).tobytes()})]
    named = transport.caller(place_of(columns, outputs={"y": columns.outputs["y"][1]}))
    assert {name: one.tolist() for name, one in named(row, 5, 1.0).items()} == {"y": [0, 0]} and named.version == 6
    assert call(None, 5, 1.0) == NOT_SENT and call(row.astype(np.float64), 5, 1.0) == NOT_FIT
    asked = len(calls.asked)
    assert call(row, 5, 0.0) == Code.TIMEOUT and "had passed" in call.message() and len(calls.asked) == asked
    calls.answers = [Failure(grpc.StatusCode.UNAVAILABLE, "it is gone")]
    assert call(row, 5, 1.0) == Code.SERVER_GONE and call.message() == "it is gone"
    for lacks in ({"input": None}, {"outputs": None}, {"rows": 2}):
        assert transport.caller(place_of(columns, **lacks)) is None
    other, _, columns = made(OPEN)
    assert other.caller(SimpleNamespace(input=1, outputs=1, rows=1)) is None


def test_a_call_that_an_interrupt_kept_from_starting_is_not_waited_for():
    transport, calls, _ = made(PLAIN)

    def interrupt(*_):
        raise KeyboardInterrupt

    calls.start = interrupt
    with pytest.raises(KeyboardInterrupt):
        transport.send(sent := ticket())
    assert not transport.holds(sent), "the lane sends it again"


def test_a_call_has_the_time_of_its_ticket_and_a_millisecond_at_least():
    transport, calls, _ = made(PLAIN)
    transport.send(ticket(left=2 * 10**9))
    transport.send(ticket(6, left=10))
    transport.exchange(ticket(7, left=2 * 10**9), 0.5)
    assert [seconds for _, seconds in calls.asked] == [2.0, 0.001, 2.0]


def test_a_call_within_the_reading_of_an_answer_leaves_it_to_the_call_that_reads(monkeypatch):
    transport, calls, columns = made(PLAIN)
    transport.send(sent := ticket())
    calls.told[0](response({"y": FOUR}))
    read, within = transport._read, []

    def nested(*given):
        if not within:
            within.append((transport.is_reading(sent), list(transport.receive(0))))
        return read(*given)

    monkeypatch.setattr(transport, "_read", nested)
    assert not transport.is_reading(sent)
    (answer,) = transport.receive(0)
    assert within == [(True, [])] and answer.code == Code.OK and not transport.is_reading(sent)
    columns.outputs["y"][:] = 9
    assert transport.receive(0) == [answer] and (columns.outputs["y"] == 9).all(), "it is not read again"


def test_a_loop_is_told_of_calls_that_ended_until_the_lane_is_closed():
    transport, calls, _ = made(PLAIN)
    told = []
    loop = SimpleNamespace(is_closed=lambda: False, call_soon=told.append)
    transport.watch(loop, (arrived := lambda: None))
    transport.send(ticket())
    calls.told[0](response({"y": FOUR}))
    assert told == [arrived]
    transport.send(ticket(6))
    transport.close()
    calls.told[1](response({"y": FOUR}))
    assert told == [arrived] and not transport.receive(0)


def test_a_forked_childs_lane_has_no_calls():
    transport, calls, _ = made(PLAIN)
    transport.send(sent := ticket())
    calls.told[0](response({"y": FOUR}))
    transport.forked()
    assert not transport.receive(0) and not transport.holds(sent)
