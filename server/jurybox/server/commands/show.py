"""`jurybox status`, `jurybox models` and `jurybox health`: the status of a running server."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

_FAILED, _USAGE = 1, 2
_TIMEOUT = 2.0  # seconds
_ERRORS = ("failed", "expired", "refused", "not_held")

Address = Annotated[
    str | None, typer.Option(help="Address of the server; without it JURYBOX_ADDRESS, or the default address.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def status(as_json: AsJson = False, address: Address = None) -> None:
    """Show the server's status: engines, models, latencies, lanes."""
    document = _ask(address)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return
    server, lanes, memory = document["server"], document["lanes"], document["memory"]
    console = output()
    console.print(
        Text(
            f"jurybox {server['build']} at {server['address']}{_gateway(server)}: {server['state']}, "
            f"up {duration(server['uptime'])}, "
            f"{lanes['in_use']} lanes with {lanes['rows']} rows leased, "
            f"{memory['shared_bytes'] / 2**20:.1f} MiB of shared memory"
        )
    )
    engines = TextTable("engine", "state", ">pid", ">restarts", ">heartbeat", ">expected wait")
    for engine in document["engines"]:
        engines.add(
            str(engine["index"]),
            "hung" if engine["hung"] else engine["state"],
            str(engine["pid"]),
            str(engine["restarts"]),
            duration(engine["heartbeat_age"]),
            duration(engine["expected_wait"]),
        )
    counts = TextTable("model", "state", ">requests", ">rows", ">batch", ">waiting", ">lanes", "errors")
    times = TextTable("p50 / p99", ">queue", ">forward", ">request")
    sessions = TextTable("sessions", ">in use", ">most")
    weights = TextTable("weights", ">version", ">lag", ">publ/s", ">adopt p50 / p99")
    for model in document["models"]:
        counts.add(
            f"{model['name']} (audit)" if model.get("audit") else model["name"],
            model["state"],
            str(model["requests"]),
            str(model["rows"]),
            batch(model["mean_batch"], model["max_batch"]),
            str(model["waiting"]),
            str(model["lanes"]["in_use"]),
            errors(model) or "-",
        )
        latency = {
            name: f"{duration(values['p50'])} / {duration(values['p99'])}" for name, values in model["latency"].items()
        }
        times.add(model["name"], latency["queue"], latency["forward"], latency["request"])
        if model["session_state"]:
            sessions.add(model["name"], str(model["sessions"]), str(model["arena"]["rows"]))
        if (of := model["weights"])["newest"]:
            columns = (str(of["version"]), _lag(of), f"{of['published_per_second']:.1f}", latency["adopt"])
            weights.add(model["name"], *columns)
    for table in (engines, counts, times, sessions, weights):
        if table.rows:
            console.print("", table, sep="\n")
    _print_reasons(console, document)


def models(as_json: AsJson = False, address: Address = None) -> None:
    """List the models: inputs, outputs, batching, weights versions."""
    document = _ask(address)
    if as_json:
        typer.echo(json.dumps(document["models"], indent=2))
        return
    console = output()
    table = TextTable("model", "state", "inputs", "outputs", ">max batch", ">rows", "weights")
    for model in document["models"]:
        table.add(
            model["name"],
            model["state"],
            _specs(model["inputs"]),
            _specs(model["outputs"]),
            str(model["max_batch"]),
            str(model["arena"]["rows"]),
            f"{model['weights']['digest'] or '-'} v{model['weights']['version']}",
        )
    console.print(table)
    _print_reasons(console, document)


def health(address: Address = None) -> None:
    """Report whether the server is ready for requests; if not, print why and exit with status 1."""
    from jurybox.server.frontend.readiness import not_ready

    reasons = not_ready(_ask(address))
    typer.echo("\n".join(reasons) or "ready", err=bool(reasons))
    raise typer.Exit(_FAILED if reasons else 0)


Name = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")]
_MOVING = 120.0  # seconds that moving weights to the host or back may take


def sleep(model: Name, address: Address = None) -> None:
    """Move a model's weights from the device to host memory; until `wake`, requests to it are refused."""
    with _connected(address) as server:
        server.sleep(model, timeout=_MOVING)
    typer.echo(f"{model} sleeps")


def wake(model: Name, address: Address = None) -> None:
    """Move a sleeping model back to the device, with the newest weights."""
    with _connected(address) as server:
        server.wake(model, timeout=_MOVING)
    typer.echo(f"{model} is awake")


def duration(seconds: float | None) -> str:
    """Format seconds in a suitable unit; "-" for None."""
    if seconds is None:
        return "-"
    for limit, scale, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if seconds < limit:
            value = seconds * scale
            return f"{value:.0f} {unit}" if value >= 10 or value == 0 else f"{value:.1f} {unit}"
    return f"{seconds / 3600:.1f} h"


def _gateway(server: dict[str, Any]) -> str:
    robots = [f"robots.{name} at {where}" for name, where in server.get("robots", {}).items()]
    robots += [f"http://{where}" for where in server.get("dialects", {}).values()]
    return "".join(
        f", {where}" for where in [*(f"{name}://{server[name]}" for name in ("http", "grpc") if server[name]), *robots]
    )


def _ask(address: str | None) -> dict[str, Any]:
    """Return the status document of the server; end the process with a message if there is none."""
    with _connected(address) as server:
        document: dict[str, Any] = server.status()
    return document


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    from jurybox.client import connect

    with reaching(address) as where, connect(where, timeout=_TIMEOUT) as server:
        yield server


@contextlib.contextmanager
def reaching(address: str | None) -> Iterator[str]:
    """Yield the address of a server; errors in the block end the process with a message."""
    from zmq import ZMQError

    from jurybox.client import Error
    from jurybox.protocol.address import default_address

    where = address or default_address()
    try:
        yield where
    except Error as error:
        typer.echo(f"jurybox: {error}", err=True)
        raise typer.Exit(_FAILED) from error
    except ValueError as error:
        typer.echo(f"jurybox: {error}", err=True)
        raise typer.Exit(_USAGE) from error
    except ZMQError as error:
        typer.echo(f"jurybox: {where!r} is no address ({error}): expected such as ipc:///run/jurybox/engine", err=True)
        raise typer.Exit(_USAGE) from error


def _lag(weights: dict[str, Any]) -> str:
    """Format the weights lag, and the largest allowed lag if there is one."""
    return f"{weights['lag']} of {weights['max_lag']}" if weights["max_lag"] else str(weights["lag"])


def _specs(specs: dict[str, Any]) -> str:
    return "\n".join(f"{name} {spec['dtype']}{spec['shape']}" for name, spec in specs.items()) or "-"


class TextTable:
    """A table that adapts to the terminal's width.

    If it does not fit, whole columns are left out, then the first column is folded; words of other columns are not
    broken. Cells are plain text: brackets are not interpreted as markup.

    Args:
        heads: names of the columns; those that begin with ">" are right-aligned.
        spare: names of columns that may be left out, in this order.
    """

    def __init__(self, *heads: str, spare: tuple[str, ...] = ()) -> None:
        self._heads = [head.lstrip(">") for head in heads]
        self._right = [head.startswith(">") for head in heads]
        self._spare = spare
        self.rows: list[list[Text]] = []

    def add(self, *cells: str | Text) -> None:
        """Add a row, with one cell for each column."""
        self.rows.append([cell if isinstance(cell, Text) else Text(cell) for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = [
            max(len(head), *(len(line) for row in self.rows for line in row[at].plain.split("\n")), 0)
            for at, head in enumerate(self._heads)
        ]
        shown = list(range(len(self._heads)))
        for name in self._spare:
            if sum(wide[at] for at in shown) + 2 * (len(shown) - 1) <= options.max_width:
                break
            shown.remove(self._heads.index(name))
        table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for at in shown:
            table.add_column(
                self._heads[at],
                justify="right" if self._right[at] else "left",
                overflow="fold",
                min_width=None if at == 0 else max(map(len, re.split(r"\s", self._heads[at]))),
                no_wrap=self._right[at],
            )
        for row in self.rows:
            table.add_row(*(row[at] for at in shown))
        yield table


class Phrases:
    """Phrases side by side, on as many lines as needed. No phrase is split."""

    def __init__(self, phrases: Sequence[str], style: str = "") -> None:
        self._phrases, self._style = phrases, style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [""]
        for phrase in self._phrases:
            longer = f"{lines[-1]}   {phrase}" if lines[-1] else phrase
            if lines[-1] and len(longer) > options.max_width:
                lines.append(phrase)
            else:
                lines[-1] = longer
        yield Text("\n".join(lines), self._style)


def batch(mean: float | None, most: int) -> str:
    """Format the mean batch size and the maximum."""
    return "-" if mean is None else f"{mean:.1f} of {most}"


def errors(counted: Mapping[str, int]) -> str:
    """Format error counts by kind; empty without errors."""
    return ", ".join(f"{counted[kind]} {kind.replace('_', ' ')}" for kind in _ERRORS if counted.get(kind))


def _print_reasons(console: Console, document: dict[str, Any]) -> None:
    for model in document["models"]:
        if model["reason"]:
            console.print(Text(f"{model['name']}: {model['reason']}", style="red"))


def output() -> Console:
    """Return a console on standard output. If that is not a terminal, lines are not wrapped, for tools such as grep."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)
