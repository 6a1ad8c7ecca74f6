"""`jurybox bench`: the throughput and latency of a running server."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any
from zipfile import is_zipfile

import typer

from jurybox.processes import ControlPipe, spawn, thread_limits
from jurybox.server.commands.show import Address, AsJson, TextTable, batch, duration, output, reaching

_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130
_CLIENT = "jurybox.server.commands.bench_client"
_ANSWER = 5.0  # seconds in which the server answers control requests
_TIMEOUT = 30.0  # seconds of one request
_START = 120.0  # seconds in which all clients must connect; a hundred interpreters start slowly
_MOST_CLIENTS = 512


def bench(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Name of the model; optional if there is only one.")
    ] = None,
    clients: Annotated[str, typer.Option(help="Client processes, one measurement for each number.")] = "1,4,16",
    rows: Annotated[int, typer.Option(min=1, help="Rows in a request.")] = 1,
    seconds: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds of a measurement.")] = 5.0,
    inputs: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Rows to send, an .npz file of arrays (n, *row shape) by input."
        ),
    ] = None,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Measure a running server: client processes ask one model as fast as it answers."""
    from jurybox.client import connect

    numbers, results = _numbers(clients), list[dict[str, Any]]()
    if inputs is not None and not is_zipfile(inputs):
        raise typer.BadParameter(f"{inputs} is no .npz file: expected one that numpy.savez wrote")
    with reaching(address) as where, connect(where, timeout=_ANSWER) as server:
        name = _chosen(model, server.models())
        most = server.describe(name).max_batch
        orders = {"address": where, "model": name, "rows": rows, "timeout": _TIMEOUT, "inputs": str(inputs or "")}
        table = TextTable("clients", ">requests/s", ">rows/s", ">p50", ">p99", ">p99.9", ">batch", "errors")
        try:
            for number in numbers:
                found = _measure(server, name, number, orders, seconds)
                results.append({"model": name, "clients": number, "rows": rows, **found})
                if not as_json:
                    table.add(*_cells(results[-1], most))
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(results, indent=2))
    else:
        output().print(table)
    for each in results:
        if each["errors"]:
            typer.echo(f"with {each['clients']} clients, the first error: {each['first_error']}", err=True)
    if not all(each["requests"] for each in results):
        raise typer.Exit(_FAILED)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if not all(0 < number <= _MOST_CLIENTS for number in numbers):
        raise typer.BadParameter(f"{text!r}: expected numbers from 1 to {_MOST_CLIENTS}, such as 1,4,16")
    return numbers


def _chosen(model: str | None, names: list[str]) -> str:
    if model is None and len(names) == 1:
        return names[0]
    if model is None:
        typer.echo(f"jurybox bench: which model? The server has {', '.join(names) or 'none'}", err=True)
        raise typer.Exit(_USAGE)
    return model


def _measure(server: Any, model: str, number: int, orders: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    with ExitStack() as ends:
        pipes = [ends.enter_context(_client(orders)) for _ in range(number)]
        until = time.monotonic() + _START
        for pipe in pipes:
            _receive(pipe, until, "ready")
        before, began = _batches(server, model), time.monotonic()
        for pipe in pipes:
            pipe.send("ask", seconds=seconds)
        until = time.monotonic() + seconds + 2 * _TIMEOUT
        found = [_receive(pipe, until, "done") for pipe in pipes]
        took = max(seconds, time.monotonic() - began)
        after = _batches(server, model)
    return _summary(found, took, int(orders["rows"]), {name: after[name] - before[name] for name in after})


@contextmanager
def _client(orders: Mapping[str, Any]) -> Iterator[ControlPipe]:
    process, pipe = spawn(_CLIENT, environment=thread_limits(1))
    try:
        pipe.send("configure", **orders)
        yield pipe
    except BaseException:
        process.kill()  # it may be in the middle of its measurement
        raise
    finally:
        pipe.close()  # on which the client ends
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _receive(pipe: ControlPipe, until: float, kind: str) -> dict[str, Any]:
    """Return a client's next message; end the command if the client failed or is late."""
    try:
        message = pipe.receive(max(0.0, until - time.monotonic()))
    except EOFError:
        message = {"kind": "failed", "reason": "a client ended without a message; its output is above"}
    if message is not None and message["kind"] == kind:
        return message
    reason = message["reason"] if message is not None else "a client did not finish in time: use fewer clients"
    typer.echo(f"jurybox bench: {reason}", err=True)
    raise typer.Exit(_FAILED)


def _batches(server: Any, model: str) -> dict[str, int]:
    status = next(each for each in server.status()["models"] if each["name"] == model)
    return {"rows": status["rows"], "batches": status["batches"]}


def _summary(found: list[dict[str, Any]], took: float, rows: int, served: Mapping[str, int]) -> dict[str, Any]:
    from jurybox.server.commands.bench_client import quantile

    times, errors = Counter[str](), Counter[str]()
    for each in found:
        times.update(each["classes"])
        errors.update(each["errors"])
    requests = sum(each["answers"] for each in found)
    return {
        "requests": requests,
        "seconds": took,
        "requests_per_second": requests / took,
        "rows_per_second": requests * rows / took,
        "latency": {name: quantile(times, share) for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))},
        "mean_batch": served["rows"] / served["batches"] if served["batches"] > 0 else None,
        "errors": dict(errors),
        "first_error": next((each["first"] for each in found if each["first"]), ""),
    }


def _cells(found: Mapping[str, Any], most: int) -> list[str]:
    return [
        str(found["clients"]),
        f"{found['requests_per_second']:,.0f}",
        f"{found['rows_per_second']:,.0f}",
        *(duration(found["latency"][name]) for name in ("p50", "p99", "p999")),
        batch(found["mean_batch"], most),
        ", ".join(f"{count} {name}" for name, count in found["errors"].items()) or "-",
    ]
