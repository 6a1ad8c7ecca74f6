"""`jurybox serve`: run a server until it is told to stop."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

_CONFIG = 2


class LogFormat(StrEnum):
    """How logs are written."""

    TEXT = "text"
    JSON = "json"


def serve(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG.toml", help="Settings in TOML.")] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Set one setting, such as models.photo.max_batch=32; repeatable."
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this host without tokens, TLS or CURVE keys.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Load and warm up every model, say what would be used, and stop.")
    ] = False,
    log_format: Annotated[LogFormat | None, typer.Option(help="As server.log_format.")] = None,
) -> None:
    """Run a server until SIGTERM or SIGINT; a second signal stops it at once."""
    from jurybox.server.config import ConfigError, load_settings, require_servable

    flags = [*(sets or []), *([f"server.log_format={log_format.value}"] if log_format else [])]
    try:
        settings = load_settings(config, flags)
        require_servable(settings, insecure=insecure)
    except ConfigError as error:
        typer.echo(f"jurybox serve: wrong configuration\n{error}", err=True)
        raise typer.Exit(_CONFIG) from error

    from jurybox.server.supervisor.run import run

    raise typer.Exit(run(settings, dry_run=dry_run))
