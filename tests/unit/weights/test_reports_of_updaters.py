"""What runs between two batches for another thread, which waits for it; and how often the same error is reported."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from jurybox.server.engine import weights_updater
from jurybox.server.engine.weights_updater import in_loop, seldom


def fails() -> None:
    raise ValueError("the stack is too small")


def test_an_error_of_an_action_in_the_loop_is_raised_where_it_is_waited_for_and_not_in_the_loop() -> None:
    ended: list[int] = []

    def later(action: Callable[[], None]) -> None:
        action()
        ended.append(1)

    with pytest.raises(ValueError, match="the stack is too small"):
        in_loop(later, fails, threading.Event())
    assert ended == [1]
    done: list[int] = []
    in_loop(later, lambda: done.append(1), threading.Event())
    assert done == [1]


def test_an_action_is_waited_for_until_the_loop_has_run_it() -> None:
    queued: list[Callable[[], None]] = []
    asked, done, order = threading.Event(), threading.Event(), list[str]()

    def later(action: Callable[[], None]) -> None:
        queued.append(action)
        asked.set()

    def wait() -> None:
        in_loop(later, lambda: order.append("run"), threading.Event())
        order.append("waited")
        done.set()

    threading.Thread(target=wait, daemon=True).start()
    assert asked.wait(30) and order == [] and not done.is_set()
    queued[0]()
    assert done.wait(30) and order == ["run", "waited"]


def test_nothing_waits_for_a_loop_that_has_ended_and_what_was_queued_for_it_is_not_done_any_more() -> None:
    queued: list[Callable[[], None]] = []
    stopped = threading.Event()
    stopped.set()
    in_loop(queued.append, fails, stopped)
    queued[0]()


def test_the_same_error_is_reported_again_after_ten_seconds_and_another_one_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, said = [100.0], list[tuple[str, dict[str, Any]]]()
    monkeypatch.setattr(weights_updater, "time", SimpleNamespace(monotonic=lambda: now[0]))
    report = seldom(lambda event, **fields: said.append((event, fields)))

    def reported(event: str, **fields: Any) -> bool:
        said.clear()
        report(event, **fields)
        assert said in ([], [(event, fields)])
        return bool(said)

    assert reported("not adopted", model="a", error="cut")
    assert not reported("not adopted", model="a", error="cut")
    assert reported("not adopted", model="b", error="cut") and reported("other", model="a", error="cut")
    now[0] += 9.9
    assert not reported("not adopted", model="a", error="cut")
    assert reported("not adopted", model="a", error="too large")
    assert not reported("not adopted", model="a", error="too large")
    now[0] += 9.9
    assert not reported("not adopted", model="a", error="too large")
    now[0] += 0.2
    assert reported("not adopted", model="a", error="too large")
    assert not reported("not adopted", model="a", error="too large")


def test_events_without_an_error_are_reported_once_in_ten_seconds_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [100.0], list[str]()
    monkeypatch.setattr(weights_updater, "time", SimpleNamespace(monotonic=lambda: now[0]))
    report = seldom(lambda event, **fields: said.append(event))
    for _ in range(3):
        report("copied in place", model="a")
    assert said == ["copied in place"]
    now[0] += 10
    report("copied in place", model="a")
    assert said == ["copied in place"] * 2
