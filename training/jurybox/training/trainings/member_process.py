"""The process of a fleet's member: one run, as `fleet` orders it over the control pipe."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import typer
from rich.console import Console

from jurybox.processes import attach, configuration
from jurybox.training.trainings.training import carried_out, left_in, named, until_interrupted


def main() -> None:
    """Run what the first message says, and exit with its status."""
    order = configuration(attach(int(sys.argv[1])))
    if order is None:
        return
    sys.path[:] = order["path"]
    folder = Path(order["folder"])

    def work(console: Console, resources: ExitStack) -> str:
        found = named(order["training"])
        return carried_out(found, found.settings.read(None, order["values"]), folder, console, **order["options"])

    try:
        until_interrupted(work, folder, message="stopping", left=lambda: left_in(folder))
    except typer.Exit as over:
        sys.exit(over.exit_code)


if __name__ == "__main__":
    main()
