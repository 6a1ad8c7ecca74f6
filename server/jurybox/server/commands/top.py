"""`jurybox top`: the live page's numbers in a terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from jurybox.server.commands.show import Address, Phrases, TextTable, batch, duration, errors, reaching

_TIMEOUT = 2.0  # seconds
_EVENTS = 6  # lines
_BLOCKS = "·▁▂▃▄▅▆▇█"
_TONES = {
    "serving": "green",
    "ready": "green",
    "sleeping": "yellow",
    "failed": "red",
    "quarantined": "red",
    "hung": "red",
    "down": "red",
    "gone": "red",
}


def top(
    once: Annotated[bool, typer.Option("--once", help="Measure for one interval, print the result, and exit.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds between two updates.")] = 1.0,
    address: Address = None,
) -> None:
    """Watch a server live: rates, latencies, batches, models, engines, events. Quit with q or Ctrl-C."""
    console = Console(highlight=False)
    if once and not console.is_terminal:
        console = Console(highlight=False, width=200)
    with reaching(address) as where:
        _look(_ScoreboardPoller(where, window=max(2.0, interval)), console, once, interval)


def _look(poller: _ScoreboardPoller, console: Console, once: bool, interval: float) -> None:
    try:
        if once:
            poller.look()
            time.sleep(interval)
            console.print(screen(poller.look()))
        else:
            _watch(poller, console, interval)
    except KeyboardInterrupt:
        return
    finally:
        poller.close()


class _ScoreboardPoller:
    """Reads the scoreboard of the server at an address; reconnects when the server is gone."""

    def __init__(self, address: str, window: float) -> None:
        from jurybox.server.watch.history import History
        from jurybox.server.watch.sample import ScoreboardReader

        self._address = address
        self._server: Any = None
        self._reader = ScoreboardReader()
        self._history = History(window)

    def look(self) -> dict[str, Any]:
        """Return the document of jurybox.server.watch.sample.

        Raises:
            Error: there is no server at the address.
        """
        from jurybox.client import Error, connect

        if self._server is None:
            self._server = connect(self._address, timeout=_TIMEOUT)
        try:
            return self._history.add(self._reader.read(self._server.status()))
        except Error:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._reader.close()


def _watch(poller: _ScoreboardPoller, console: Console, interval: float) -> None:
    """Refresh the screen until q or Ctrl-C; show when the server stops, and when another one starts."""
    from jurybox.client import Error

    last: dict[str, Any] = poller.look()
    with _Keys() as keys, Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        live.update(screen(last), refresh=True)
        while not keys.quit_within(interval):
            try:
                last = poller.look()
                live.update(screen(last), refresh=True)
            except Error as error:
                gone = Panel(Text(f"the server is gone: {error}"), style="red", title="trying again")
                live.update(Group(gone, screen(last)), refresh=True)


class _Keys:
    """Reads single keys from the terminal; reads none if standard input is not a terminal."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[Any] | None = None

    def __enter__(self) -> _Keys:
        if self._fd is not None:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)  # unlike raw mode, it leaves Ctrl-C a signal
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None and self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def quit_within(self, seconds: float) -> bool:
        """Wait that long. Return True as soon as q is pressed, or the terminal is closed; else False."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._fd is None:
                time.sleep(left)
            elif select.select([self._fd], [], [], left)[0]:
                pressed = os.read(self._fd, 64)
                if b"q" in pressed.lower():
                    return True
                if not pressed:  # the terminal was closed
                    return True
        return False


def screen(sample: dict[str, Any]) -> RenderableType:
    """Render a document of jurybox.server.watch.sample."""
    server, rates, latency = sample["server"], sample["rates"], sample["latency"]
    first = [*sample["first_request"], ""] if sample["first_request"] else []
    head = Text(f"jurybox {server['build']} at {server['address']}  ")
    head.append(server["state"], _TONES.get(server["state"], "yellow"))
    head.append(f"  up {duration(server['uptime'])}")
    words = [
        *(f"{_count(rates[name])} {name}/s" for name in ("rows", "requests", "batches")),
        f"{sample['waiting']} waiting",
        f"{sample['lanes']['in_use']} lanes",
        _bytes(sample["memory"]),
    ]
    stages = [f"{stage} {duration(values['p50'])} / {duration(values['p99'])}" for stage, values in latency.items()]
    return Group(
        head,
        Phrases(words, "bold"),
        Phrases([f"p50 / p99: {stages[0]}", *stages[1:], f"batches {_bars(sample['batch']['counts'])}"]),
        Text(),
        *(Text(line, "green") for line in first),
        _models(sample["models"]),
        Text(),
        _engines(sample["engines"]),
        Text(),
        *map(_event, sample["events"][-_EVENTS:]),
    )


def _models(models: list[dict[str, Any]]) -> TextTable:
    table = TextTable(
        "model", "state", ">rows/s", ">p50", ">p99", ">batch", ">sizes", ">waiting", ">lanes", ">version", ">lag",
        "errors", spare=("sizes", "lanes", "waiting", "version", "p50"),
    )  # fmt: skip
    for model in models:
        weights, request = model["weights"], model["latency"]["request"]
        table.add(
            Text(model["name"], "bold"),
            Text(model["state"], _TONES.get(model["state"], "yellow")),
            _count(model["rates"]["rows"]),
            duration(request["p50"]),
            duration(request["p99"]),
            batch(model["batch"]["mean"], model["max_batch"]),
            _bars(model["batch"]["counts"]),
            str(model["waiting"]),
            str(model["lanes"]["in_use"]),
            str(weights["version"]),
            Text(str(weights["lag"]), "yellow" if weights["lag"] > 1 else ""),
            Text(errors(model["errors"]) or "-", "red" if any(model["failures"].values()) else ""),
        )
    return table


def _engines(engines: list[dict[str, Any]]) -> TextTable:
    table = TextTable("engine", "state", ">busy", ">requests/s", ">expected wait", ">device memory", ">restarts",
                  spare=("device memory", "expected wait"))  # fmt: skip
    for engine in engines:
        table.add(
            str(engine["index"]),
            Text(engine["state"], _TONES.get(engine["state"], "yellow")),
            f"{engine['busy']:.0%}",
            _count(engine["rates"]["requests"]),
            duration(engine["expected_wait"]),
            f"{engine['device_bytes'] / 2**20:.0f} MiB" if engine["device_bytes"] else "-",
            str(engine["restarts"]),
        )
    return table


def _event(event: dict[str, Any]) -> Text:
    line = Text(datetime.fromtimestamp(event["at"]).strftime("%H:%M:%S "), "dim")
    line.append(event["text"], {"error": "red", "warning": "yellow"}.get(event["level"], "default"))
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _bars(counts: list[int]) -> str:
    """Return a bar chart of a histogram with power-of-two buckets, beginning with one row."""
    shown = counts[1 : max(5, *(at + 1 for at, count in enumerate(counts) if count), 0)]
    most = max(shown)
    return "".join(_BLOCKS[-(-count * 8 // most)] if count else _BLOCKS[0] for count in shown) if most else "-"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _bytes(memory: dict[str, int]) -> str:
    device = f", {memory['device_bytes'] / 2**20:.0f} MiB on devices" if memory["device_bytes"] else ""
    return f"{memory['shared_bytes'] / 2**20:.1f} MiB shared{device}"
