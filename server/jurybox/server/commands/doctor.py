"""`jurybox doctor`: what this host lacks, and what to do about it."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

_FAILED = 1
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Remove the shared memory and sockets that dead servers left.")
    ] = False,
) -> None:
    """Say what this host lacks; exit status 1 where a server could not run."""
    from jurybox.server.doctor import examine
    from jurybox.server.findings import Level

    findings = examine(fix=fix)
    failed = any(finding.level is Level.FAIL for finding in findings)
    if as_json:
        report = {"ok": not failed, "findings": [dataclasses.asdict(finding) for finding in findings]}
        typer.echo(json.dumps(report, indent=2))
    else:
        console = Console(soft_wrap=True, highlight=False)
        for finding in findings:
            line = Text(f"{finding.level.upper():<5}", style=_STYLES[finding.level])
            line.append(f"{finding.subject}: {finding.found}", style="default")
            console.print(line)
            if finding.remedy:
                console.print(Text(f"     {finding.remedy}"))
    raise typer.Exit(_FAILED if failed else 0)
