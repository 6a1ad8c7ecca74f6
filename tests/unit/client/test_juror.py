"""How a juror's threads share the calls that wait."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest

from jurybox.client import juror as juror_module
from jurybox.client.juror import Juror, Passing, Scores, _ScoreCall, _Vote, score_output, weighted
from jurybox.client.juror_calls import CallAnswer, WaitingCalls
from jurybox.client.juror_rows import CallRows, fitted
from jurybox.client.ticket import Reply
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.errors import Busy, Code, ModelFailed, ModelNotFound, Refused, ServerGone, SpecMismatch, Timeout

SPEC = ModelSpec("m", {"x": TensorSpec("float32", ())}, {"score": TensorSpec("float32", ())})


def call(n):
    return _ScoreCall({"x": [float(i) for i in range(n)]}, n, 0.0)


def waiting(*calls, idle=0):
    """Calls that wait, for one thread that takes them and `idle` others."""
    made = WaitingCalls()
    made._idle = idle
    made.put(calls)
    return made


def taken(made):
    return [(part.asked, part.first, part.end) for part in made.take()]


def test_a_lone_thread_takes_all_calls_in_order():
    a, b, c = call(3), call(0), call(2)
    made = waiting(a, b, c)
    assert taken(made) == [(a, 0, 3), (b, 0, 0), (c, 0, 2)]
    assert not made and taken(made) == []


def test_threads_share_the_rows_of_few_calls_and_of_many():
    large, small = call(5), [call(1) for _ in range(3)]
    made = waiting(large, *small, idle=1)
    assert taken(made) == [(large, 0, 4)]
    made._idle = 0
    assert taken(made) == [(large, 4, 5), *((one, 0, 1) for one in small)]
    assert taken(waiting(call(0), idle=3))[0][1:] == (0, 0)


def test_what_was_put_back_is_first():
    a, b = call(2), call(2)
    made = waiting(a, idle=1)
    parts = made.take()
    made.put([b])
    made.put_back(parts)
    made._idle = 0
    assert taken(made) == [(a, 0, 1), (a, 1, 2), (b, 0, 2)]


def test_a_cancelled_or_failed_call_is_not_sent():
    cancelled, failed, other = call(2), call(4), call(1)
    assert cancelled.answer.cancel()
    made = waiting(cancelled, failed, other, idle=1)
    assert taken(made) == [(failed, 0, 4)]
    assert not failed.answer.cancel(), "a part of it is being sent"
    failed.fail(ServerGone("over"))
    made = waiting(failed, other)
    assert taken(made) == [(other, 0, 1)]
    with pytest.raises(ServerGone):
        failed.answer.result(0)


def test_a_call_is_answered_with_its_last_part():
    asked = call(3)
    asked.found(1, [0.5, "no score"], [7])
    assert not asked.answer.done()
    asked.found(0, [0.25], [5])
    scores = asked.answer.result(0)
    assert scores == [0.25, 0.5, "no score"] and scores.version == 5
    asked.fail(ServerGone("too late"))
    assert asked.answer.result(0) is scores


def test_parts_that_several_threads_have_scored_are_all_counted():
    asked = call(2)
    other = threading.Thread(target=asked.found, args=(1, [0.5], [5]))

    def versions():
        yield 7
        other.start()
        other.join(0.05)
        assert other.is_alive(), "it waits until this part is counted"

    asked.found(0, [0.25], versions())
    other.join(30)
    scores = asked.answer.result(0)
    assert scores == [0.25, 0.5] and scores.version == 5


def test_a_call_is_fitted_once_and_fails_once():
    asked = call(2)
    asked.fit_once(SPEC, {})
    rows = asked.rows
    asked.fit_once(SPEC, {})
    assert asked.rows is rows and len(rows) == 2
    wrong = _ScoreCall({"y": [1.0]}, 1, 0.0)
    for _ in range(2):
        with pytest.raises(SpecMismatch, match="expected a column"):
            wrong.fit_once(SPEC, {})


def test_a_call_that_two_threads_send_is_fitted_once():
    asked, fits = call(2), []
    fit = asked.fit
    other = threading.Thread(target=asked.fit_once, args=(SPEC, {}))

    def counted(*args, **options):
        fits.append(1)
        if len(fits) == 1:
            other.start()
            other.join(0.05)
        fit(*args, **options)

    asked.fit = counted
    asked.fit_once(SPEC, {})
    other.join(30)
    assert len(fits) == 1 and len(asked.rows) == 2


class Member:
    """A panel's member that answers when the test says so."""

    def _hand_over(self, calls):
        (self.vote,) = calls


def voting(asked):
    members = {"a": (2.0, Member()), "b": (1.0, Member())}
    _Vote(asked, members)
    return members["a"][1].vote, members["b"][1].vote


def test_a_panels_reason_is_passing_only_if_each_members_is():
    asked = call(4)
    a, b = voting(asked)
    b.found(0, [0.5, Passing("busy"), "wrong", Passing("busy")], [3])
    assert not asked.answer.done()
    a.found(0, [1.0, Passing("down"), Passing("down"), 1.0], [4])
    scores = asked.answer.result(0)
    assert scores == [2.5, "a: down; b: busy", "a: down; b: wrong", "b: busy"]
    assert [isinstance(score, Passing) for score in scores] == [False, True, False, True]
    assert scores.version == 3 and scores.parts["b"][0] == 0.5


def test_a_member_that_is_down_has_no_score_and_any_other_error_is_raised():
    asked = call(1)
    a, b = voting(asked)
    a.fail(ServerGone("down"))
    b.found(0, [0.5], [3])
    (score,) = asked.answer.result(0)
    assert isinstance(score, Passing) and score == "a: down"
    asked = call(1)
    a, b = voting(asked)
    a.fail(SpecMismatch("wrong"))
    b.found(0, [0.5], [3])
    with pytest.raises(SpecMismatch, match="wrong"):
        asked.answer.result(0)


def test_a_call_that_is_late_takes_its_members_calls_back():
    asked = call(2)
    a, b = voting(asked)
    scores = asked.late(0.5)
    assert all(isinstance(score, Passing) and "within 0.5 s" in score for score in scores) and len(scores) == 2
    assert taken(waiting(a, b)) == [], "they are not sent"
    answered = call(1)
    answered.found(0, [0.5], [1])
    assert answered.late(0.5) == [0.5]


class Scorer:
    """A model whose score is the row's number; `refuses` says which requests it refuses."""

    spec = SPEC

    def __init__(self, refuses):
        self.refuses, self.sizes, self.closed = refuses, [], 0

    def close(self):
        self.closed += 1

    def _reply(self, numbers):
        self.sizes.append(len(numbers))
        if (error := self.refuses(numbers)) is not None:
            raise error
        return Reply(np.array(numbers, np.float32), 1)

    def row_reply(self, row, timeout):
        return self._reply([float(row)])

    def infer_reply(self, inputs, timeout):
        return self._reply(inputs["x"].tolist())


def asked_of(scorer, numbers, seconds=60.0):
    juror = Juror("m", address="/nowhere")
    return juror._ask(scorer, [{"x": np.float32(x)} for x in numbers], time.monotonic() + seconds, [])


FAILS = ModelFailed("bad"), Refused("too large", Code.TOO_LARGE)


@pytest.mark.parametrize("error", FAILS, ids=["failed", "too-large"])
def test_only_the_row_that_the_model_refuses_has_no_score(error):
    scorer = Scorer(lambda numbers: error if 2.0 in numbers else None)
    scores = asked_of(scorer, range(8))
    assert [score if isinstance(score, float) else "none" for score in scores] == [0, 1, "none", 3, 4, 5, 6, 7]
    assert str(error) in scores[2] and not isinstance(scores[2], Passing)
    assert scorer.sizes == [8, 4, 2, 2, 1, 1, 4]


@pytest.mark.parametrize("error", FAILS, ids=["failed", "too-large"])
def test_after_its_deadline_a_call_is_not_divided_any_more(error):
    scorer = Scorer(lambda numbers: error)
    assert len(asked_of(scorer, range(8), -1.0)) == 8 and scorer.sizes == [8]


def test_a_refusal_for_another_reason_is_raised_and_a_score_that_is_no_number_is_a_reason():
    scorer = Scorer(lambda numbers: Refused("not now", Code.REFUSED))
    with pytest.raises(Refused, match="not now"):
        asked_of(scorer, range(4))
    assert scorer.sizes == [4]
    assert asked_of(Scorer(lambda _: None), [1, np.inf, np.nan]) == [1, "the score is inf", "the score is nan"]
    assert asked_of(Scorer(lambda _: None), [np.nan]) == ["the score is nan"]


def test_threads_end_after_the_last_call():
    made = WaitingCalls()
    found = []

    def work():
        while made.wait():
            found.extend(part.asked for part in made.take())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    calls = [call(1) for _ in range(50)]
    for one in calls:
        made.put([one])
    made.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert sorted(map(id, found)) == sorted(map(id, calls))


# ---- the rows of a call


def fitted_rows(columns, n, spec=SPEC, inputs=None, **more):
    made = CallRows(columns, n, 0.0)
    made.fit(spec, inputs or {}, **more)
    return made.rows


def test_an_inputs_values_come_from_its_own_column_then_from_the_trainers_or_from_what_the_caller_says():
    text = ModelSpec("m", {"text": TensorSpec("bytes", capacity=8)}, SPEC.outputs)
    assert fitted_rows({"completions": ["c"], "response": ["r"], "text": ["t"]}, 1, text) == [{"text": b"t"}]
    assert fitted_rows({"response": ["r"], "completions": ["c"], "text": None}, 1, text) == [{"text": b"c"}]
    assert fitted_rows({"a": ["a"], "text": ["t"]}, 1, text, {"text": "a"}) == [{"text": b"a"}]
    assert fitted_rows({"a": ["a"]}, 1, text, {"text": lambda columns: columns["a"]}) == [{"text": b"a"}]
    with pytest.raises(SpecMismatch, match=r"expected a column 'b', there are \['text'\]; say which with inputs="):
        fitted_rows({"text": ["t"]}, 1, text, {"text": "b"})
    with pytest.raises(SpecMismatch, match="expected 2 values, came 1"):
        fitted_rows({"text": ["t"]}, 2, text)
    with pytest.raises(SpecMismatch, match=r"model 'm' has no input other: it takes \['text'\]"):
        fitted_rows({"text": ["t"]}, 1, text, {"other": "text"})
    assert fitted_rows({"text": ["t"]}, 1, text, {"other": "text"}, partial=True) == [{"text": b"t"}]


def test_a_row_that_does_not_fit_has_its_reason_and_a_call_of_which_none_fits_is_refused():
    assert fitted_rows({"x": [1.0, "one"]}, 2)[0] == {"x": 1.0}
    assert type(fitted_rows({"x": [1.0, "one"]}, 2)[1]) is str
    assert type(fitted_rows({"x": ["one"]}, 1)[0]) is str and fitted_rows({"x": []}, 0) == []
    with pytest.raises(SpecMismatch, match="not one of 2 rows fits model 'm'; the first: "):
        fitted_rows({"x": ["one", "two"]}, 2)


TEXT, PICTURE = TensorSpec("bytes", capacity=8), TensorSpec("uint8", (-1, -1, 3), capacity=300)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("größe", "größe".encode()),
        (b"\xff", b"\xff"),
        ("12345678", b"12345678"),
        ({"role": "user", "content": "hi"}, b"hi"),
        ({"role": "user", "content": None}, b""),
        ({"type": "text", "text": "hi"}, b"hi"),
        ([{"content": [{"text": "a"}, {"type": "image"}]}, {"content": "b"}], b"a\nb"),
    ],
)
def test_text_is_that_of_a_string_a_message_or_several(value, text):
    assert fitted("t", TEXT, value) == text


@pytest.mark.parametrize(
    ("spec", "value", "told"),
    [
        (TEXT, "123456789", "t has 9 bytes, the model takes at most 8"),
        (TEXT, 5, "expected text or chat messages, came int"),
        (
            TensorSpec("uint8"),
            np.array(256, np.uint16),
            "has the value 256, which the model's uint8 cannot hold",
        ),
        (TensorSpec("int8"), np.array(-129), "has the value -129"),
        (TensorSpec("uint8"), np.array(1), "t is int64, the model takes uint8"),
        (TensorSpec("float16"), np.array(70000.0), "which the model's float16 cannot hold"),
        (TensorSpec("uint8"), np.array(1.0), "t is float64, the model takes uint8"),
        (TensorSpec("float32", (2,)), np.zeros(3, np.float32), r"t is of shape \(3,\), the model takes"),
        (PICTURE, np.zeros((11, 10, 3), np.uint8), r"t is of shape \(11, 10, 3\)"),
    ],
)
def test_a_value_that_the_model_cannot_take_is_refused_with_words(spec, value, told):
    with pytest.raises((SpecMismatch, TypeError), match=told):
        fitted("t", spec, value)


@pytest.mark.parametrize("value", [255, 0])
def test_a_number_that_the_models_dtype_holds_is_converted(value):
    assert fitted("t", TensorSpec("uint8"), np.array(value, np.uint16)) == value
    assert fitted("t", TensorSpec("float16"), np.array(-np.inf)) == -np.inf
    assert np.isnan(fitted("t", TensorSpec("float32"), np.array(np.nan)))
    same = np.ones((2, 3), np.float32)
    assert fitted("t", TensorSpec("float32", (2, 3)), same) is same
    turned = fitted("t", TensorSpec("float32", (3, 2)), same.T)
    assert turned.flags.c_contiguous and turned.shape == (3, 2)


def test_a_picture_may_have_its_channels_first_unless_it_is_three_pixels_wide():
    first = np.arange(24, dtype=np.uint8).reshape(3, 2, 4)
    assert fitted("t", PICTURE, first).tolist() == first.transpose(1, 2, 0).tolist()
    narrow = np.arange(18, dtype=np.uint8).reshape(3, 2, 3)
    assert fitted("t", PICTURE, narrow) is narrow or fitted("t", PICTURE, narrow).tolist() == narrow.tolist()


# ---- the score, and panels


@pytest.mark.parametrize(
    ("outputs", "name", "chosen"),
    [
        ({"y": ()}, None, "y"),
        ({"y": (1,)}, None, "y"),
        ({"y": (), "z": ()}, "z", "z"),
        ({"y": (), "z": ()}, None, None),
        ({"y": (2,)}, None, None),
        ({"y": ()}, "z", None),
    ],
)
def test_the_score_is_the_only_output_or_the_one_that_is_named_if_it_is_one_number(outputs, name, chosen):
    specs = {key: TensorSpec("float32", shape) for key, shape in outputs.items()}
    if chosen is not None:
        assert score_output("m", name, specs) == chosen
        return
    with pytest.raises(SpecMismatch, match="model 'm' gives y float32.*: name the one number that is the score"):
        score_output("m", name, specs)
    with pytest.raises(SpecMismatch):
        score_output("m", None, {"t": TEXT})


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ({}, "a panel without members"),
        ({"a": float("nan")}, "the weight of 'a' is nan, expected a finite number"),
        ({"a": {"weight": 1, "colour": 2}}, r"member 'a': \['colour'\] is not known, expected weight, model, output, "),
    ],
)
def test_a_panel_that_cannot_be_is_refused_when_it_is_made(members, told):
    with pytest.raises(ValueError, match=told):
        Juror(members)


def test_members_of_a_panel_have_its_settings_unless_they_have_their_own():
    made = Juror(
        {"a": 2, "b": {"weight": 0.5, "model": "other", "output": "y", "address": "/there"}},
        inputs={"x": "column"}, address="/here", timeout=7.0, priority=1,
    )  # fmt: skip
    for juror in (made, pickle.loads(pickle.dumps(made))):
        assert juror.name == "a+b" and juror.spec is None
        (weight_a, a), (weight_b, b) = juror._members.values()
        assert (weight_a, a.name, a._output, a._address) == (2.0, "a", None, "/here")
        assert (weight_b, b.name, b._output, b._address) == (0.5, "other", "y", "/there")
        assert all((one._timeout, one._priority, one._inputs) == (7.0, 1, {"x": "column"}) for one in (a, b))
        assert juror._needs(b) and not a._needs(b)
    for priority in (0, 4):
        with pytest.raises(ValueError, match="priority="):
            Juror("m", priority=priority)


def test_a_panels_score_is_the_sum_by_weight_if_that_is_a_number():
    parts = {"a": Scores([1.0, 3e38, "no"], [4]), "b": Scores([0.5, 1.0, 1.0], [3])}
    scores = weighted({"a": 2.0, "b": -1.0}, parts, 3)
    assert scores == [1.5, 6e38 - 1.0, "a: no"] and scores.version == 3
    assert weighted({"a": 1e308, "b": 1.0}, parts, 2)[1] == "the total is inf"
    assert Scores().version == 0


# ---- the answer to a call


def test_an_answer_is_given_once_and_everybody_who_waits_is_told():
    answer, told = CallAnswer(), []
    answer.when_done(told.append)
    with pytest.raises(TimeoutError):
        answer.result(0.001)
    assert not answer.done() and not told
    answer.set_result(5)
    answer.set_exception(ServerGone("late"))
    answer.set_result(6)
    assert answer.done() and told == [answer] and [answer.result(0) for _ in range(2)] == [5, 5]
    answer.when_done(told.append)
    assert told == [answer] * 2, "there is an answer already"
    assert not answer.cancel() and answer.begin()


def test_a_call_is_cancelled_only_before_it_is_sent():
    before, sent = CallAnswer(), CallAnswer()
    assert before.cancel() and not before.cancel() and not before.begin()
    with pytest.raises(CancelledError, match="the call was cancelled"):
        before.result(0)
    assert sent.begin() and not sent.cancel() and not sent.done()


def test_a_task_that_is_cancelled_takes_its_call_back_and_one_that_waits_too_long_does_not():
    async def ask():
        waited, dropped, given = CallAnswer(), CallAnswer(), CallAnswer()
        with pytest.raises(TimeoutError):
            await waited.awaited(0.001)
        task = asyncio.ensure_future(dropped.awaited(1000.0))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        asyncio.get_running_loop().call_soon(given.set_result, 5)
        return waited.done(), dropped.begin(), await given.awaited(1000.0)

    assert asyncio.run(ask()) == (False, False, 5)


# ---- a juror and its server


class Host:
    """A server whose models are scorers; it has lanes for so many, and panels."""

    def __init__(self, engines=1, lanes=16, panels=None, refuses=lambda numbers: None):
        self.of, self.lanes, self.panels, self.refuses = engines, lanes, panels or {}, refuses
        self.asked, self.closed, self.made, self.connected = [], 0, [], []

    def connect(self, address, *, timeout, priority):
        self.connected.append((address, timeout, priority))
        self.free = self.lanes
        return self

    def model(self, name, **more):
        self.asked.append((name, more))
        if name not in ("m", "b"):
            raise ModelNotFound(f"no model {name!r}")
        if not self.free:
            raise Busy("no lane is free")
        self.free -= 1
        self.made.append(Scorer(self.refuses))
        return self.made[-1]

    def engines(self, name):
        return self.of

    def status(self):
        return {"panels": self.panels}

    def close(self):
        self.closed += 1


@pytest.fixture
def hosted(monkeypatch):
    """Make a juror of a host."""

    def make(host, name="m", **more):
        monkeypatch.setattr(juror_module, "connect", host.connect)
        return Juror(name, address="/here", timeout=30.0, **more)

    return make


@pytest.mark.parametrize(("engines", "lanes", "models"), [(1, 16, 1), (3, 16, 3), (3, 2, 2), (40, 40, 16)])
def test_a_juror_has_a_lane_for_each_engine_as_far_as_there_are_free_ones(hosted, engines, lanes, models):
    host, before = Host(engines, lanes), set(threading.enumerate())
    juror = hosted(host, priority=3)
    assert juror.spec is None
    assert juror.scores({"x": [1.0, 2.0]}, 2) == [1, 2] and juror.spec is SPEC
    assert host.connected == [("/here", 30.0, 3)] and len(host.made) == models
    assert host.asked[0] == ("m", {}) and all(one == ("m", {"wait": False}) for one in host.asked[1:])
    assert juror.scores({"x": [3.0]}, 1).version == 1 and len(host.connected) == 1
    threads = set(threading.enumerate()) - before
    assert len(threads) == models, "a thread for each"
    assert all(thread.daemon for thread in threads), "a process that ends waits for none"
    juror.close()
    juror.close()
    assert host.closed == 1 and juror.spec is None
    assert juror.scores({"x": [4.0]}, 1) == [4] and len(host.connected) == 2
    juror.close()


@pytest.fixture
def starting(monkeypatch):
    """Let so many threads start, and then no more, as where the process has all that it may have."""
    left, start = [0], threading.Thread.start

    def counted(thread):
        if thread.name.startswith("rewards"):
            if not left[0]:
                raise RuntimeError("can't start new thread")
            left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    return left


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_calls_for_which_no_thread_can_start_are_told_at_once_and_sent_never(hosted, starting, as_coroutine):
    juror = hosted(host := Host())

    def ask(x):
        return asyncio.run(juror.scores_async({"x": [x]}, 1)) if as_coroutine else juror.scores({"x": [x]}, 1)

    for _ in range(2):
        with pytest.raises(Busy, match="no thread to send calls of 'm' .can't start new thread.: ask again"):
            ask(1.0)
    starting[0] = 1
    assert ask(2.0) == [2] and host.made[0].sizes == [1], "what was refused is not sent"
    juror.close()


def test_a_juror_uses_as_many_lanes_as_it_has_threads(hosted, starting):
    juror, starting[0] = hosted(host := Host(engines=4)), 2
    assert juror.scores({"x": [1.0, 2.0]}, 2) == [1, 2] and len(host.made) == 4
    assert [scorer.closed for scorer in host.made] == [0, 0, 1, 1] and len(juror._models) == 2
    juror.close()


def test_calls_of_one_turn_of_a_loop_are_sent_together_and_each_gets_its_own(hosted):
    host = Host()
    juror = hosted(host)

    async def both():
        return await asyncio.gather(*(juror.scores_async({"x": [x, x + 1]}, 2) for x in (1.0, 5.0)))

    assert asyncio.run(both()) == [[1, 2], [5, 6]] and host.made[0].sizes == [4]
    assert asyncio.run(juror.scores_async({"x": [9.0]}, 1)) == [9], "also if it is alone"
    juror.close()


@pytest.mark.parametrize("panels", [{}, {"all": {"m": 1.0, "b": {"weight": 0.5, "address": "/there"}}}])
def test_a_name_that_is_no_models_may_be_a_panels(hosted, panels):
    host = Host(panels=panels)
    juror = hosted(host, "all")
    if not panels:
        with pytest.raises(ModelNotFound, match="no model 'all'"):
            juror.scores({"x": [2.0]}, 1)
        assert host.closed == 1
        return
    scores = juror.scores({"x": [2.0, 4.0]}, 2)
    assert scores == [3, 6] and scores.parts == {"m": [2, 4], "b": [2, 4]}
    assert host.closed == 1, "the connection on which the panel was found"
    assert sorted(address for address, *_ in host.connected[1:]) == ["/here", "/there"]
    assert juror.scores({"x": [2.0]}, 1) == [3] and len(host.connected) == 3
    juror.close()
    assert host.closed == 3


def test_a_member_that_is_not_there_is_no_panel_itself(hosted):
    host = Host(panels={"other": {"m": 1.0}})
    with pytest.raises(ModelNotFound, match="no model 'other'"):
        hosted(host, {"m": 1.0, "other": 1.0}).scores({"x": [2.0]}, 1)


def test_errors_that_may_pass_are_reasons_and_the_others_are_raised(hosted):
    juror = hosted(Host(refuses=lambda numbers: Timeout("late")))
    scores = juror.scores({"x": [1.0, 2.0]}, 2)
    assert [(type(score), str(score)) for score in scores] == [(Passing, "late")] * 2 and scores.version == 0
    juror.close()
    juror = hosted(Host(refuses=lambda numbers: Refused("not now")))
    with pytest.raises(Refused, match="not now"):
        juror.scores({"x": [1.0, 2.0]}, 2)
    with pytest.raises(SpecMismatch, match="expected a column"):
        juror.scores({"y": [1.0]}, 1)
    juror.close()


def test_a_score_that_is_asked_for_within_the_thread_that_sends_is_computed_there(hosted):
    """As a destructor does that the garbage collector runs in this thread: it must not wait for the thread."""
    came = []

    def nested(numbers):
        if numbers == [1.0]:
            came.append(juror.scores({"x": [7.0]}, 1))
            with pytest.raises(Refused, match="scores of 'm.b' are under way, and this thread sends them"):
                panel.scores({"x": [7.0]}, 1)

    host = Host(refuses=nested)
    juror = hosted(host)
    panel = hosted(host, {"m": 1.0, "b": 1.0})
    panel._members["m"] = (1.0, juror)
    assert juror.scores({"x": [1.0]}, 1) == [1] and came == [[7]] and host.made[0].sizes == [1, 1]
    juror.close()
    panel.close()


def test_a_pickled_juror_has_its_settings_and_connects_by_itself(hosted):
    host = Host()
    juror = hosted(host, inputs={"x": "column"}, priority=1)
    juror.scores({"column": [1.0]}, 1)
    other = pickle.loads(pickle.dumps(juror))
    assert other.spec is None and other.scores({"column": [2.0]}, 1) == [2]
    assert host.connected == [("/here", 30.0, 1)] * 2
    juror.close()
    other.close()


def test_a_thread_whose_lane_was_closed_ends_and_leaves_calls_to_the_others(hosted):
    asked, made = call(2), WaitingCalls()
    made.put([asked])
    assert juror_module._serve(hosted(Host()), made, Scorer(lambda numbers: None)) is False
    assert taken(made) == [(asked, 0, 2)]


def test_a_call_that_a_panels_members_answer_does_not_fail_before():
    asked = call(1)
    asked.waits_for = [call(1)]
    asked.fail(ServerGone("one of them"))
    assert not asked.answer.done()


def test_calls_that_still_wait_when_their_juror_is_gone_get_an_error():
    asked, made = [call(1), call(2)], WaitingCalls()
    made.put(asked)
    assert juror_module._serve(None, made, None)
    for one in asked:
        with pytest.raises(ServerGone, match="this juror was closed"):
            one.answer.result(0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_an_array_is_taken_as_it_is_or_converted_to_the_models_dtype(dtype):
    spec, given = TensorSpec("float32", (2,)), np.array([1, 2], dtype)
    row = fitted("x", spec, given)
    assert row.dtype == np.float32 and row.tolist() == [1, 2] and (row is given) == (dtype is np.float32)
    strided = np.array([1, 0, 2, 0], dtype)[::2]
    assert fitted("x", spec, strided).flags.c_contiguous and fitted("x", spec, strided).tolist() == [1, 2]


def test_a_picture_alone_in_a_list_is_that_picture_and_several_are_no_row():
    picture = pytest.importorskip("PIL.Image").new("L", (4, 2), 7)
    spec = TensorSpec("uint8", (2, 4, 3))
    for value in (picture, [picture], (picture,)):
        assert (fitted("image", spec, value) == np.full((2, 4, 3), 7)).all()
    with pytest.raises((SpecMismatch, TypeError, ValueError)):
        fitted("image", spec, [picture, picture])
