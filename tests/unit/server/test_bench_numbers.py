"""`jurybox bench` with made-up clients: what it counts, prints and says, and that no client outlives it."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import jurybox.client
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.errors import Busy, ModelFailed, ServerGone
from jurybox.server.commands import bench, bench_client
from jurybox.server.commands.bench_client import classes, main, quantile, rows_of

COMMAND = typer.Typer(add_completion=False)
COMMAND.command()(bench.bench)
READY = {"kind": "ready"}


def done(answers: int = 2, counts: Any = None, errors: Any = None, first: str = "") -> dict[str, Any]:
    return {
        "kind": "done",
        "answers": answers,
        "classes": counts or {"700": answers},
        "errors": errors or {},
        "first": first,
    }


class Measuring:
    """A server, and the clients that are started; each says what `says` has for it. Time passes at an order to ask."""

    def __init__(self, *says: list[Any]) -> None:
        self.says, self.pipes, self.events = list(says), list[Any](), list[str]()
        self.names, self.now, self.hangs = ["photo"], 100.0, 0
        self.counts = [{"rows": 5, "batches": 1}, {"rows": 17, "batches": 5}]
        self.waits: list[tuple[float, str]] = []

    def connect(self, address: str, timeout: float) -> Any:
        assert (address, timeout) == ("ipc:///x/engine", 5.0)
        return self

    def __enter__(self) -> Measuring:
        return self

    def __exit__(self, *_: object) -> None:
        self.events.append("disconnected")

    def models(self) -> list[str]:
        return self.names

    def describe(self, name: str) -> Any:
        return SimpleNamespace(max_batch=64)

    def status(self) -> Any:
        count = self.counts.pop(0)
        self.counts.append({"rows": count["rows"] + 12, "batches": count["batches"] + 4})
        return {"models": [{"name": "other", "rows": 0, "batches": 0}, {"name": "photo", **count}]}

    def spawn(self, module: str, environment: Any) -> tuple[Any, Any]:
        assert module == "jurybox.server.commands.bench_client" and environment
        number, says = len(self.pipes), self.says.pop(0)
        orders: list[Any] = []

        def send(kind: str, **fields: Any) -> None:
            orders.append((kind, fields))
            if kind == "ask" and number == 0:
                self.now += 2.0

        def receive(seconds: float) -> Any:
            self.waits.append((seconds, orders[-1][0]))
            message = says.pop(0)
            if isinstance(message, BaseException):
                raise message
            return message

        def wait(seconds: float | None = None) -> None:
            self.events.append(f"wait {number}")
            if self.hangs and seconds is not None:
                self.hangs -= 1
                raise subprocess.TimeoutExpired("client", seconds)

        note = self.events.append
        self.pipes.append(
            SimpleNamespace(send=send, receive=receive, close=lambda: note(f"close {number}"), orders=orders)
        )
        return SimpleNamespace(kill=lambda: note(f"kill {number}"), wait=wait), self.pipes[-1]

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    def ran(measuring: Measuring, *arguments: str) -> Any:
        monkeypatch.setattr(jurybox.client, "connect", measuring.connect)
        monkeypatch.setattr(bench, "spawn", measuring.spawn)
        monkeypatch.setattr(bench, "time", measuring)
        return CliRunner().invoke(COMMAND, [*arguments, "--address", "ipc:///x/engine"])

    return ran


def test_the_numbers_of_all_clients_are_one_for_each_count_of_clients(run: Any) -> None:
    measuring = Measuring(
        [READY, done(3, {"0": 3})],
        [READY, done(2, {"0": 1, "100": 1}, {"Busy": 1}, "full")],
        [READY, done(4, {"100": 4}, {"Busy": 2, "Timeout": 1}, "late")],
    )
    result = run(measuring, "--clients", "1,2", "--rows", "4", "--seconds", "1.5", "--json")
    assert result.exit_code == 0, result.output
    one, two = json.loads(result.stdout)
    assert (one["model"], one["clients"], one["rows"], one["requests"], one["seconds"]) == ("photo", 1, 4, 3, 2.0)
    assert (one["requests_per_second"], one["rows_per_second"], one["mean_batch"]) == (1.5, 6.0, 3.0)
    assert (one["errors"], one["first_error"]) == ({}, "")
    assert (two["clients"], two["requests"], two["seconds"]) == (2, 6, 1.5), "as long as it was to last"
    assert (two["errors"], two["first_error"]) == ({"Busy": 3, "Timeout": 1}, "full")
    assert two["latency"]["p50"] == pytest.approx(1e-6 * 1.01**100.5)
    orders = {"address": "ipc:///x/engine", "model": "photo", "rows": 4, "timeout": 30.0, "inputs": ""}
    assert [pipe.orders for pipe in measuring.pipes] == [[("configure", orders), ("ask", {"seconds": 1.5})]] * 3
    assert measuring.events == [
        "close 0", "wait 0", "close 2", "wait 2", "close 1", "wait 1", "disconnected",
    ]  # fmt: skip
    assert [waits for waits in measuring.waits if waits[1] == "configure"] == [(120.0, "configure")] * 3
    assert next(waits for waits in measuring.waits if waits[1] == "ask") == (61.5, "ask")
    assert result.stderr.splitlines() == ["with 2 clients, the first error: full"]


def test_a_line_of_the_table_is_one_count_of_clients(run: Any) -> None:
    result = run(Measuring([READY, done(2000, {"700": 2000}, {"Busy": 1}, "full")]), "photo", "--clients", "1")
    assert result.exit_code == 0
    head, line = result.stdout.splitlines()
    assert head.split() == ["clients", "requests/s", "rows/s", "p50", "p99", "p99.9", "batch", "errors"]
    assert line.split() == ["1", "400", "400", "1.1", "ms", "1.1", "ms", "1.1", "ms", "3.0", "of", "64", "1", "Busy"]


def test_without_an_answer_there_are_no_numbers_and_the_status_is_1(run: Any) -> None:
    measuring = Measuring([READY, {**done(0, errors={"Busy": 7}, first="full"), "classes": {}}])
    measuring.counts = [{"rows": 0, "batches": 0}] * 2
    result = run(measuring, "--clients", "1", "--json")
    assert result.exit_code == 1 and "with 1 clients, the first error: full" in result.stderr
    (found,) = json.loads(result.stdout)
    assert found["mean_batch"] is None
    assert found["latency"] == {"p50": None, "p99": None, "p999": None}
    table = run(Measuring([READY, {**done(0), "classes": {}}]), "--clients", "1").stdout
    assert table.splitlines()[1].split()[:6] == ["1", "0", "0", "-", "-", "-"]


@pytest.mark.parametrize("text", ["0", "1,0", "513", "-1", "many", "1,,2", ""])
def test_a_number_of_clients_that_cannot_be_is_exit_status_2(run: Any, text: str) -> None:
    measuring = Measuring()
    result = run(measuring, "--clients", text)
    assert result.exit_code == 2 and "expected numbers" in result.stderr and not measuring.events


def test_a_file_that_numpy_did_not_write_is_exit_status_2(run: Any, tmp_path: Any) -> None:
    (tmp_path / "rows.npz").write_text("no zip")
    result = run(Measuring(), "--inputs", str(tmp_path / "rows.npz"))
    assert result.exit_code == 2 and "no .npz file" in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(("names", "said"), [(["a", "b"], "The server has a, b"), ([], "The server has none")])
def test_which_model_is_asked_of_a_server_that_has_not_one(run: Any, names: list[str], said: str) -> None:
    measuring = Measuring()
    measuring.names = names
    result = run(measuring)
    assert result.exit_code == 2 and f"which model? {said}" in result.stderr


@pytest.mark.parametrize(
    ("says", "status", "said"),
    [
        ([{"kind": "failed", "reason": "it broke"}], 1, "jurybox bench: it broke"),
        ([None], 1, "a client did not finish in time: use fewer clients"),
        ([EOFError()], 1, "a client ended without a message"),
        ([READY, None], 1, "a client did not finish in time"),
        ([READY, KeyboardInterrupt()], 130, ""),
    ],
)
def test_a_client_that_fails_ends_all_of_them(run: Any, says: list[Any], status: int, said: str) -> None:
    measuring = Measuring([READY, done()], says)
    result = run(measuring, "--clients", "2")
    assert result.exit_code == status and said in result.stderr
    assert sorted(measuring.events[:-1]) == sorted(f"{what} {n}" for n in (0, 1) for what in ("close", "kill", "wait"))


def test_a_client_that_does_not_end_is_killed(run: Any) -> None:
    measuring = Measuring([READY, done()])
    measuring.hangs = 1
    assert run(measuring, "--clients", "1").exit_code == 0
    assert measuring.events[:-1] == ["close 0", "wait 0", "kill 0", "wait 0"]


# ----
# The client.

SPEC = ModelSpec(
    "m",
    {
        "x": TensorSpec("float32", (2, 3)),
        "n": TensorSpec("int64", ()),
        "text": TensorSpec("bytes", capacity=9),
        "any": TensorSpec("float32", (-1,), capacity=9),
    },
    {"y": TensorSpec("float32", ())},
)


def test_rows_that_are_not_given_are_made() -> None:
    rows = rows_of(SPEC, {}, 5)
    assert rows["x"].shape == (5, 2, 3) and rows["x"].dtype == np.float32 and len(np.unique(rows["x"])) == 30
    assert ((rows["x"] >= 0) & (rows["x"] < 1)).all()
    assert rows["n"].tolist() == [0] * 5 and rows["n"].dtype == np.int64 and rows["text"] == [b"0000"] * 5
    assert [(row.ndim, row.any()) for row in rows["any"]] == [(1, False)] * 5


def test_rows_that_are_given_are_repeated_from_the_first() -> None:
    assert rows_of(SPEC, {"n": np.arange(3)}, 5)["n"].tolist() == [0, 1, 2, 0, 1]
    assert rows_of(SPEC, {"n": np.arange(3)}, 2)["n"].tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"no input 'a': expected x, n, text, any"):
        rows_of(SPEC, {"b": np.arange(3), "n": np.arange(3), "a": np.arange(3)}, 5)
    for none in (np.zeros(0, np.int64), np.int64(3)):
        with pytest.raises(ValueError, match="the array for input 'n' has no rows"):
            rows_of(SPEC, {"n": np.asarray(none)}, 5)


def test_a_class_is_a_percent_wide_and_begins_with_a_microsecond() -> None:
    durations = np.array([0.0, 1e-9, 1.005e-6, 1.015e-6, 1.015e-6, 1.0])
    assert classes(durations) == {"0": 3, "1": 2, "1388": 1}
    assert classes(np.array([])) == {}


@pytest.mark.parametrize(("share", "number"), [(0.0, 0), (0.5, 0), (0.51, 9), (0.75, 9), (0.76, 100), (1.0, 100)])
def test_a_quantile_is_the_middle_of_its_class(share: float, number: int) -> None:
    counts = {"100": 1, "0": 2, "9": 1}
    assert quantile(counts, share) == pytest.approx(1e-6 * 1.01 ** (number + 0.5))


class Ordered:
    """The pipe to the command: it gives the orders and notes the messages."""

    def __init__(self, *orders: Any) -> None:
        self.orders, self.sent, self.waited = list(orders), list[Any](), list[float]()

    def receive(self, seconds: float) -> Any:
        self.waited.append(seconds)
        order = self.orders.pop(0)
        if isinstance(order, BaseException):
            raise order
        return order

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append((kind, fields))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A server with a model; `outcomes` are raised if they are errors, and each request takes a second."""
    seen = SimpleNamespace(now=0.0, outcomes=[], rows=[], rests=[], state={}, closed=0, connected=None, sessions=None)
    configured = {"address": "ipc:///x", "model": "m", "rows": 2, "timeout": 30.0, "inputs": ""}
    seen.configured = configured

    def infer(inputs: Any) -> None:
        seen.now += 1.0
        seen.rows.append(inputs)
        outcome = seen.outcomes.pop(0) if seen.outcomes else None
        if isinstance(outcome, BaseException):
            raise outcome

    def sessions(n: int) -> Any:
        seen.sessions = n
        return SimpleNamespace(infer=infer)

    class Server:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            seen.closed += 1

        def model(self, name: str) -> Any:
            assert name == "m"
            spec = ModelSpec("m", {"n": TensorSpec("int64", ())}, SPEC.outputs, seen.state)
            return SimpleNamespace(spec=spec, infer=None if seen.state else infer, sessions=sessions)

    def connect(address: str, timeout: float) -> Server:
        seen.connected = (address, timeout)
        if seen.outcomes and isinstance(seen.outcomes[0], OSError):
            raise seen.outcomes[0]
        return Server()

    monkeypatch.setattr(bench_client, "connect", connect)
    monkeypatch.setattr(bench_client, "configuration", lambda _: seen.configured)
    clock = SimpleNamespace(perf_counter=lambda: seen.now, sleep=seen.rests.append)
    monkeypatch.setattr(bench_client, "time", clock)
    return seen


def test_a_client_asks_once_and_then_as_long_as_it_is_told(asked: SimpleNamespace) -> None:
    asked.outcomes = [None, None, Busy("full"), Busy("still"), ModelFailed("no")]
    pipe = Ordered(None, None, {"seconds": 6.0})
    main(pipe)  # type: ignore[arg-type]
    (ready, (kind, found)) = pipe.sent
    assert ready == ("ready", {}) and kind == "done" and pipe.waited == [30.0] * 3
    assert found["answers"] == 3 and found["classes"] == {"1388": 3} and found["first"] == "full"
    assert found["errors"] == {"Busy": 2, "ModelFailed": 1} and len(asked.rests) == 3
    assert asked.connected == ("ipc:///x", 30.0) and asked.closed == 1 and len(asked.rows) == 7
    assert all(rows["n"].tolist() == [0, 0] for rows in asked.rows)


def test_a_client_of_a_model_with_state_has_a_session_for_each_row(asked: SimpleNamespace) -> None:
    asked.state = {"h": TensorSpec("float32", ())}
    pipe = Ordered({"seconds": 1.0})
    main(pipe)  # type: ignore[arg-type]
    assert asked.sessions == 2 and pipe.sent[-1][1]["answers"] == 1


def test_a_client_sends_the_rows_of_a_file(asked: SimpleNamespace, tmp_path: Any) -> None:
    np.savez(tmp_path / "rows.npz", n=np.arange(5, 8))
    asked.configured["inputs"] = str(tmp_path / "rows.npz")
    main(Ordered({"seconds": 1.0}))  # type: ignore[arg-type]
    assert [rows["n"].tolist() for rows in asked.rows] == [[5, 6]] * 2


@pytest.mark.parametrize("error", [ModelFailed("no"), ServerGone("gone"), ValueError("other"), OSError("no file")])
def test_a_client_that_cannot_ask_says_why(asked: SimpleNamespace, error: Exception) -> None:
    asked.outcomes = [error]
    pipe = Ordered()
    main(pipe)  # type: ignore[arg-type]
    assert pipe.sent == [("failed", {"reason": str(error)})]


def test_a_client_whose_command_has_ended_says_nothing(asked: SimpleNamespace) -> None:
    pipe = Ordered(EOFError())
    main(pipe)  # type: ignore[arg-type]
    assert pipe.sent == [("ready", {})] and asked.closed == 1
    asked.configured = None
    asked.connected = None
    main(Ordered())  # type: ignore[arg-type]
    assert asked.connected is None
