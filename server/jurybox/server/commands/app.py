"""The command line: `jurybox serve`, `doctor`, `keys`, and the commands of other packages."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from jurybox.protocol.revision import install_command, source_revision
from jurybox.protocol.wire import PROTOCOL_VERSION, build_version

GROUP = "jurybox.commands"
_USAGE = 2
_SHOW, _TOP, _BENCH = (f"jurybox.server.commands.{name}" for name in ("show", "top", "bench"))
# Commands of this package that print tables. They are imported late, since `serve` does not need what they import.
_LATER = [
    EntryPoint(name, f"{module}:{name}", GROUP)
    for module, names in (
        (_SHOW, ("status", "models", "health", "sleep", "wake")),
        (_TOP, ("top",)),
        (_BENCH, ("bench",)),
    )
    for name in names
]
_OURS = ("serve", "status", "models", "health", "top", "bench", "sleep", "wake", "doctor", "keys")  # in this order


class PluginCommand(TyperCommand):
    """A placeholder for a command that is not imported yet."""

    def __init__(self, point: EntryPoint) -> None:
        super().__init__(name=point.name, help=_summary(point))
        self.point = point

    def load(self) -> Any:
        """Import and return the command; end the process with a message if a package is not installed."""
        try:
            target = self.point.load()
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] == "jurybox":
                raise
            package = self.point.dist.name if self.point.dist else "its package"
            remedy = install_command("training") if package == "jurybox" else f"pip install '{package}'"
            typer.echo(f"jurybox {self.name}: {error.name} is not installed. Install it with: {remedy}", err=True)
            raise typer.Exit(_USAGE) from error
        if isinstance(target, typer.Typer):
            command: Any = get_group(target)
        else:
            single = typer.Typer(add_completion=False)
            single.command()(target)
            command = get_command(single)
        command.name = self.name
        return command


class PluginGroup(TyperGroup):
    """The group of all commands, those of this package first. Entry points are searched only for other names."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of that name, or its placeholder; None if there is none."""
        if cmd_name not in self.commands:
            self._find_all()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        self._find_all()
        return super().list_commands(ctx)

    def _find_all(self) -> None:
        points = [*_LATER, *sorted(entry_points(group=GROUP), key=lambda point: point.name)]
        found = {**{point.name: PluginCommand(point) for point in reversed(points)}, **self.commands}
        names = dict.fromkeys([*_OURS, *(point.name for point in points), *self.commands])
        self.commands = {name: found[name] for name in names}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command to run, and import it if it is a placeholder."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, PluginCommand) else command, rest


def _summary(point: EntryPoint) -> str:
    """Return a command's one-line help (help=, its docstring or its module's), read from the source without import."""
    fallback = f"From {point.module}."
    try:
        spec = importlib.util.find_spec(point.module)
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8")) if spec and spec.origin else None
    except (ImportError, OSError, SyntaxError, ValueError):
        return fallback
    if tree is None:
        return fallback
    own = next((text for node in tree.body if (text := _help_in(node, point.attr))), None)
    return (own or ast.get_docstring(tree) or fallback).splitlines()[0]


def _help_in(node: ast.stmt, name: str) -> str | None:
    """Return the help text in a statement that is `def name` or `name = Typer(help=...)`; else None."""
    match node:
        case ast.FunctionDef() if node.name == name:
            return ast.get_docstring(node)
        case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call(keywords=keywords)) if target == name:
            for keyword in keywords:
                if keyword.arg == "help" and isinstance(keyword.value, ast.Constant):
                    return str(keyword.value.value)
    return None


_FAILED = 1


def keys(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="Where to write NAME.key and NAME.key_secret.")],
) -> None:
    """Generate a pair of CURVE keys: NAME.key (public, for the other side) and NAME.key_secret (private)."""
    from jurybox.server.security.access import make_pair

    try:
        public_file, secret_file, public = make_pair(name)
    except OSError as error:
        typer.echo(f"jurybox keys: {error}", err=True)
        raise typer.Exit(_FAILED) from error
    typer.echo(f"{public_file}: public, give it to the other side: {public}\n{secret_file}: secret, keep it")


_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="A server's configuration, to check its limits.", exists=True, dir_okay=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Remove the shared memory and sockets that dead servers left.")
    ] = False,
) -> None:
    """Check whether a server can run on this host; exit with status 1 if not."""
    from jurybox.server.doctor.checks import examine
    from jurybox.server.doctor.host import Level

    try:
        findings = examine(fix=fix, config=config)
    except ValueError as error:  # no TOML
        typer.echo(f"jurybox doctor: {config}: {error}", err=True)
        raise typer.Exit(_FAILED) from error
    failed = any(finding.level is Level.FAIL for finding in findings)
    if as_json:
        report = {"ok": not failed, "findings": [dataclasses.asdict(finding) for finding in findings]}
        typer.echo(json.dumps(report, indent=2))
    else:
        from rich.console import Console
        from rich.text import Text

        console = Console(soft_wrap=True, highlight=False)
        for finding in findings:
            line = Text(f"{finding.level.upper():<5}", style=_STYLES[finding.level])
            line.append(f"{finding.subject}: {finding.found}", style="default")
            console.print(line)
            if finding.remedy:
                console.print(Text(f"     {finding.remedy}"))
    raise typer.Exit(_FAILED if failed else 0)


_CONFIG, _INTERRUPTED = 2, 130


class LogFormat(StrEnum):
    """The format of log lines."""

    TEXT = "text"
    JSON = "json"


def serve(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG.toml", help="TOML file with settings.")] = None,
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
        bool, typer.Option("--dry-run", help="Load and warm up every model, print what would be used, and exit.")
    ] = False,
    log_format: Annotated[LogFormat | None, typer.Option(help="Overrides server.log_format.")] = None,
) -> None:
    """Run a server until SIGTERM or SIGINT; a second signal stops it at once."""
    try:
        status = _served(config, sets or [], insecure=insecure, dry_run=dry_run, log_format=log_format)
    except KeyboardInterrupt as error:  # before the server handles signals itself
        typer.echo("jurybox serve: interrupted before it served", err=True)
        raise typer.Exit(_INTERRUPTED) from error
    raise typer.Exit(status)


def _served(
    config: Path | None, sets: list[str], *, insecure: bool, dry_run: bool, log_format: LogFormat | None
) -> int:
    from jurybox.server.settings.config import InvalidConfig, load_settings, require_servable
    from jurybox.server.supervisor.interpreters import misfits

    flags = [*sets, *([f"server.log_format={log_format.value}"] if log_format else [])]
    try:
        settings = load_settings(config, flags)
        require_servable(settings, insecure=insecure)
        if wrong := misfits(settings.pythons()):
            raise InvalidConfig("\n".join(wrong))
    except InvalidConfig as error:
        typer.echo(f"jurybox serve: wrong configuration\n{error}", err=True)
        raise typer.Exit(_CONFIG) from error
    # The server's own engines need it, also if every model has an interpreter of its own. An engine could only report
    # a traceback, and would be started again.
    if importlib.util.find_spec("torch") is None:
        typer.echo(
            "jurybox serve: torch is not installed, and engines need it. Install it with: "
            f"{install_command('server')} (docs/install.md: for the CPU alone install torch first)",
            err=True,
        )
        raise typer.Exit(_CONFIG)

    from jurybox.server.supervisor.run import run

    return run(settings, dry_run=dry_run)


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


for command in (serve, doctor, keys):
    app.command()(command)
