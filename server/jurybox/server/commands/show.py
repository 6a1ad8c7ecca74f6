"""`jurybox status`, `jurybox models` and `jurybox health`: what a running server says of itself."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

_FAILED, _USAGE = 1, 2
_TIMEOUT = 2.0  # seconds

Address = Annotated[
    str | None, typer.Option(help="Where the server is; JURYBOX_ADDRESS or the default address without it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def status(as_json: AsJson = False, address: Address = None) -> None:
    """Show how the server is: engines, models, latencies, lanes."""
    document = _ask(address)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return
    server, lanes, memory = document["server"], document["lanes"], document["memory"]
    console = _console()
    console.print(
        Text(
            f"jurybox {server['build']} at {server['address']}{_gateway(server)}: {server['state']}, "
            f"up {duration(server['uptime'])}, "
            f"{lanes['in_use']} lanes with {lanes['rows']} rows leased, "
            f"{memory['shared_bytes'] / 2**20:.1f} MiB of shared memory"
        )
    )
    console.print(
        _table(
            ["engine", "state", "pid", "restarts", "heartbeat", "expected wait"],
            [
                [
                    str(engine["index"]),
                    "hung" if engine["hung"] else engine["state"],
                    str(engine["pid"]),
                    str(engine["restarts"]),
                    duration(engine["heartbeat_age"]),
                    duration(engine["expected_wait"]),
                ]
                for engine in document["engines"]
            ],
        )
    )
    console.print(
        _table(
            ["model", "state", "requests", "rows", "batch", "queue p50/p99", "forward p50/p99", "request p50/p99",
             "version", "lag", "publ/s", "adopt p50/p99", "lanes", "errors"],
            [_status_row(model) for model in document["models"]],
        )
    )  # fmt: skip
    _print_reasons(console, document)


def models(as_json: AsJson = False, address: Address = None) -> None:
    """List the models: what they take and give, how they are batched, which weights they have."""
    document = _ask(address)
    if as_json:
        typer.echo(json.dumps(document["models"], indent=2))
        return
    console = _console()
    console.print(
        _table(
            ["model", "state", "inputs", "outputs", "max batch", "rows", "weights"],
            [
                [
                    model["name"],
                    model["state"],
                    _specs(model["inputs"]),
                    _specs(model["outputs"]),
                    str(model["max_batch"]),
                    str(model["arena"]["rows"]),
                    f"{model['weights']['digest'] or '-'} v{model['weights']['version']}",
                ]
                for model in document["models"]
            ],
        )
    )
    _print_reasons(console, document)


def health(address: Address = None) -> None:
    """Say whether the server is ready for requests; exit status 1, with the reasons, where it is not."""
    from jurybox.server.gateway.health import not_ready

    reasons = not_ready(_ask(address))
    typer.echo("\n".join(reasons) or "ready", err=bool(reasons))
    raise typer.Exit(_FAILED if reasons else 0)


def duration(seconds: float | None) -> str:
    """Seconds in the unit that suits them; "-" for None."""
    if seconds is None:
        return "-"
    for limit, scale, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if seconds < limit:
            value = seconds * scale
            return f"{value:.0f} {unit}" if value >= 10 or value == 0 else f"{value:.1f} {unit}"
    return f"{seconds / 3600:.1f} h"


def _gateway(server: dict[str, Any]) -> str:
    return "".join(f", {scheme}://{server[scheme]}" for scheme in ("http", "grpc") if server[scheme])


def _ask(address: str | None) -> dict[str, Any]:
    """The status document of the server there; ends the process with a message when there is none."""
    from zmq import ZMQError

    from jurybox.client import Error, connect
    from jurybox.protocol.address import default_address

    where = address or default_address()
    try:
        with connect(where, timeout=_TIMEOUT) as server:
            return server.status()
    except Error as error:
        typer.echo(f"jurybox: {error}", err=True)
        raise typer.Exit(_FAILED) from error
    except (ZMQError, ValueError) as error:
        typer.echo(f"jurybox: {where!r} is no address ({error}): expected such as ipc:///run/jurybox/engine", err=True)
        raise typer.Exit(_USAGE) from error


def _status_row(model: dict[str, Any]) -> list[str]:
    latency = {
        name: f"{duration(values['p50'])} / {duration(values['p99'])}" for name, values in model["latency"].items()
    }
    batch, errors = (
        model["mean_batch"],
        [
            f"{model[name]} {name.replace('_', ' ')}"
            for name in ("failed", "expired", "refused", "not_held")
            if model.get(name)
        ],
    )
    return [
        model["name"],
        model["state"],
        str(model["requests"]),
        str(model["rows"]),
        "-" if batch is None else f"{batch:.1f}",
        latency["queue"],
        latency["forward"],
        latency["request"],
        str(model["weights"]["version"]),
        _lag(model["weights"]),
        f"{model['weights']['published_per_second']:.1f}" if model["weights"]["newest"] else "-",
        latency["adopt"],
        str(model["lanes"]["in_use"]),
        ", ".join(errors) or "-",
    ]


def _lag(weights: dict[str, Any]) -> str:
    """Versions behind, beside the most there should be."""
    return f"{weights['lag']} of {weights['max_lag']}" if weights["max_lag"] else str(weights["lag"])


def _specs(specs: dict[str, Any]) -> str:
    return "\n".join(f"{name} {spec['dtype']}{spec['shape']}" for name, spec in specs.items()) or "-"


def _table(head: list[str], rows: list[list[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # as text: a name in brackets is no markup
    return table


def _print_reasons(console: Console, document: dict[str, Any]) -> None:
    for model in document["models"]:
        if model["reason"]:
            console.print(Text(f"{model['name']}: {model['reason']}", style="red"))


def _console() -> Console:
    """Standard output; where it is no terminal, wide enough that nobody's grep meets a broken line."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)
