"""The command line put together."""

from __future__ import annotations

from typing import Annotated

import typer

from jurybox.protocol.wire import PROTOCOL_VERSION, build_version
from jurybox.server.commands.doctor import doctor
from jurybox.server.commands.keys import keys
from jurybox.server.commands.plugins import PluginGroup
from jurybox.server.commands.serve import serve
from jurybox.server.commands.show import health, models, status
from jurybox.server.commands.top import top
from jurybox.server.revision import source_revision

app = typer.Typer(
    cls=PluginGroup,
    help="A long-running inference service for reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        revision = f", revision {commit[:12]}" if (commit := source_revision()) else ""
        typer.echo(f"jurybox {build_version()} (protocol {PROTOCOL_VERSION}{revision})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """A long-running inference service for reinforcement learning."""


for command in (serve, status, models, health, top, doctor, keys):
    app.command()(command)
