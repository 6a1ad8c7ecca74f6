"""`jurybox keys`: pairs of CURVE keys for servers and clients that meet on a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_FAILED = 1


def keys(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="Where to write NAME.key and NAME.key_secret.")],
) -> None:
    """Make a pair of CURVE keys: NAME.key to give to the other side, NAME.key_secret to keep."""
    from jurybox.server.security.curve import make_pair

    try:
        public_file, secret_file, public = make_pair(name)
    except OSError as error:
        typer.echo(f"jurybox keys: {error}", err=True)
        raise typer.Exit(_FAILED) from error
    typer.echo(f"{public_file}: public, give it to the other side: {public}\n{secret_file}: secret, keep it")
