"""Calls of a juror that are late, nested in its threads, or sent together with wrong ones."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.serving import wait_until
from tests.unit.client.test_juror import Host, Scorer

from jurybox.client import juror as juror_module
from jurybox.client.juror import Juror, Passing, Scores
from jurybox.client.ticket import Reply
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.errors import Refused, RowFailed, SpecMismatch

Make = Callable[..., Juror]


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make jurors of a host, which are closed after the test."""
    made: list[Juror] = []

    def make(host: Host, name: Any = "m", timeout: float = 30.0, **more: Any) -> Juror:
        monkeypatch.setattr(juror_module, "connect", host.connect)
        made.append(Juror(name, address="/here", timeout=timeout, **more))
        return made[-1]

    yield make
    for juror in made:
        juror.close()


def asked(juror: Juror, as_coroutine: bool, numbers: list[float]) -> Scores:
    columns = {"x": numbers}
    if as_coroutine:
        return asyncio.run(juror.scores_async(columns, len(numbers)))
    return juror.scores(columns, len(numbers))


class Timed(Scorer):
    """Tells the seconds that each request may take; answers as `does` says."""

    def __init__(self, does: Callable[[list[float]], Any]) -> None:
        super().__init__(lambda numbers: None)
        self.does, self.seconds = does, list[float]()

    def _timed(self, numbers: list[float], seconds: float) -> Any:
        self.seconds.append(seconds)
        return self.does(numbers) or Reply(np.array(numbers, np.float32), 1)

    def row_reply(self, row: Any, timeout: float) -> Any:
        return self._timed([float(row)], timeout)

    def infer_reply(self, inputs: Any, timeout: float) -> Any:
        return self._timed(inputs["x"].tolist(), timeout)


class TimedHost(Host):
    """A server with such models."""

    def __init__(self, does: Callable[[list[float]], Any] = lambda numbers: None, **more: Any) -> None:
        super().__init__(**more)
        self.does = does

    def model(self, name: str, **more: Any) -> Any:
        super().model(name, **more)
        self.made[-1] = Timed(self.does)
        return self.made[-1]


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_a_request_has_the_time_that_is_left_of_its_callers(hosted: Make, as_coroutine: bool) -> None:
    juror = hosted(host := TimedHost(), timeout=1000.0)
    assert asked(juror, as_coroutine, [1.0]) == [1] and asked(juror, as_coroutine, [1.0, 2.0]) == [1, 2]
    assert all(0 < seconds <= 1000.0 for seconds in host.made[0].seconds) and len(host.made[0].seconds) == 2


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_scores_that_come_too_late_are_missing_for_now(
    hosted: Make, monkeypatch: pytest.MonkeyPatch, as_coroutine: bool
) -> None:
    monkeypatch.setattr(juror_module, "_GRACE", 0.01)
    over = threading.Event()
    juror = hosted(TimedHost(lambda numbers: over.wait(60) and None), timeout=0.02)
    try:
        scores = asked(juror, as_coroutine, [1.0, 2.0])
        assert [type(score) for score in scores] == [Passing] * 2
        assert scores[0] == "no score came within 0.02 s: others' requests took too long"
    finally:
        over.set()


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_a_server_has_a_moment_after_the_time_out_to_say_why_there_is_no_score(
    hosted: Make, monkeypatch: pytest.MonkeyPatch, as_coroutine: bool
) -> None:
    monkeypatch.setattr(juror_module, "_GRACE", 60.0)
    juror = hosted(TimedHost(lambda numbers: time.sleep(0.05)), timeout=0.001)
    assert asked(juror, as_coroutine, [1.0]) == [1]


def test_a_model_of_several_inputs_gets_a_single_row_by_name(hosted: Make) -> None:
    number = TensorSpec("float32")
    rows = []

    class Two(Scorer):
        spec = ModelSpec("m", {"x": number, "y": number}, {"score": number})

        def row_reply(self, row: Any, timeout: float) -> Reply:
            rows.append(row)
            return Reply(np.float32(3), 1)

    host = Host()
    host.model = lambda name, **more: Two(lambda numbers: None)  # type: ignore[method-assign]
    assert hosted(host).scores({"x": [1.0], "y": [2.0]}, 1) == [3]
    assert rows == [{"x": 1.0, "y": 2.0}]


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_the_model_has_failed_have_their_reasons_beside_the_others_scores(hosted: Make, rows: int) -> None:
    outputs = np.arange(rows, dtype=np.float32)
    error = RowFailed("1 row failed", errors={rows - 1: "it is odd"}, outputs=outputs, version=8)
    scores = hosted(Host(refuses=lambda numbers: error)).scores({"x": [5.0] * rows}, rows)
    assert scores == [*range(rows - 1), "it is odd"] and scores.version == 8
    assert not isinstance(scores[-1], Passing)


def test_a_caller_with_a_wrong_column_takes_no_score_from_those_that_are_sent_with_it(hosted: Make) -> None:
    juror = hosted(host := Host())

    async def both() -> list[Any]:
        calls = (juror.scores_async(columns, 1) for columns in ({"y": [1.0]}, {"x": [2.0]}))
        return await asyncio.gather(*calls, return_exceptions=True)

    wrong, scores = asyncio.run(both())
    assert type(wrong) is SpecMismatch and scores == [2] and host.made[0].sizes == [1]


def test_inputs_of_a_panels_other_members_are_no_error_also_within_a_members_thread(hosted: Make) -> None:
    number = TensorSpec("float32")

    class Other(Scorer):
        spec = ModelSpec("b", {"z": number}, {"score": number})

    came = []

    def nested(numbers: list[float]) -> None:
        if numbers == [1.0]:
            came.append(panel._members["m"][1].scores({"column": [7.0], "z": [4.0]}, 1))

    host = Host()

    def model(name: str, **more: Any) -> Scorer:
        return Scorer(nested) if name == "m" else Other(lambda numbers: None)

    host.model = model  # type: ignore[method-assign]
    panel = hosted(host, {"m": 1.0, "b": 2.0}, inputs={"x": "column", "z": "z"})
    assert panel.scores({"column": [1.0], "z": [4.0]}, 1) == [9] and came == [[7]]


def test_a_thread_of_one_juror_may_ask_another_that_does_not_need_it(hosted: Make) -> None:
    came = []

    def nested(numbers: list[float]) -> None:
        if numbers == [1.0]:
            came.extend(other.scores({"x": [7.0]}, 1) for other in (alone, panel))

    juror = hosted(Host(refuses=nested))
    juror.scores({"x": [2.0]}, 1)
    host = Host()
    alone, panel = hosted(host), hosted(host, {"m": 1.0, "b": 1.0})
    assert juror.scores({"x": [1.0]}, 1) == [1] and came == [[7], [14]]
    assert not panel._needs(juror) and not panel._needs(alone)


def test_a_score_within_the_thread_of_a_juror_that_has_just_been_closed_is_refused(hosted: Make) -> None:
    raised = []

    def nested(numbers: list[float]) -> None:
        if numbers == [1.0]:
            juror.close()
            with pytest.raises(Refused, match="scores of 'm' are under way") as error:
                juror.scores({"x": [7.0]}, 1)
            raised.append(error)

    juror = hosted(Host(refuses=nested))
    assert juror.scores({"x": [1.0]}, 1) == [1] and raised


def test_each_thread_of_a_juror_computes_nested_scores_on_its_own_lane_and_no_panels(hosted: Make) -> None:
    """The other lanes are in use by other threads."""
    came: dict[int, Any] = {}
    both = threading.Barrier(2)

    class Lane(Scorer):
        def _reply(self, numbers: list[float]) -> Reply:
            reply = super()._reply(numbers)
            if numbers in ([1.0], [2.0]):
                both.wait(60)
                with pytest.raises(Refused, match="under way"):
                    panel.scores({"x": [5.0]}, 1)
                came[id(self)] = juror.scores({"x": [7.0]}, 1)
            return reply

    host = Host(engines=2)
    lanes: list[Lane] = []
    host.model = lambda name, **more: lanes.append(Lane(lambda numbers: None)) or lanes[-1]  # type: ignore
    juror = hosted(host)
    panel = hosted(host, {"m": 1.0, "b": 1.0})
    panel._members["m"] = (1.0, juror)
    assert juror.scores({"x": [9.0]}, 1) == [9]
    lanes[0].sizes.clear()
    lanes[1].sizes.clear()
    assert len(lanes) == 2
    answers: dict[float, Any] = {}

    def ask(number: float) -> None:
        answers[number] = juror.scores({"x": [number]}, 1)

    threads = [threading.Thread(target=ask, args=(number,)) for number in (1.0, 2.0)]
    for waiting, thread in enumerate(threads):
        wait_until(lambda n=waiting: both.n_waiting == n, 60.0, "the first lane")
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {1.0: [1], 2.0: [2]} and came == {id(lane): [7] for lane in lanes}
    assert [lane.sizes for lane in lanes] == [[1, 1]] * 2


def test_a_nested_request_has_a_time_out_of_its_own(hosted: Make) -> None:
    def nested(numbers: list[float]) -> None:
        if numbers == [1.0]:
            juror.scores({"x": [7.0]}, 1)

    juror = hosted(host := TimedHost(nested), timeout=1000.0)
    assert juror.scores({"x": [1.0]}, 1) == [1]
    outer, inner = host.made[0].seconds
    assert 0 < outer <= 1000.0 and outer <= inner <= 1000.0
