"""Commands that other packages bring, by the entry-point group "jurybox.commands".

An entry point names a typer.Typer (its commands become `jurybox NAME COMMAND`) or a function (`jurybox NAME`). It is
imported when its command is run, and not for `--help`, which reads the command's summary from its source instead: a
training's imports take seconds.
"""

from __future__ import annotations

import ast
import importlib.util
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

GROUP = "jurybox.commands"
_USAGE = 2


class PluginCommand(TyperCommand):
    """Stands for a command that is not imported yet."""

    def __init__(self, point: EntryPoint) -> None:
        super().__init__(name=point.name, help=_summary(point))
        self.point = point

    def load(self) -> Any:
        """The command itself. Ends the process with a message when something that it needs is not installed."""
        try:
            target = self.point.load()
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] == "jurybox":
                raise
            package = self.point.dist.name if self.point.dist else "its package"
            extra = "jurybox[training]" if package == "jurybox" else package
            typer.echo(
                f"jurybox {self.name}: {error.name} is not installed. Install it with: pip install '{extra}'", err=True
            )
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
    """The group of all commands, our own first."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
            if point.name not in self.commands:
                self.add_command(PluginCommand(point))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command that is run, imported if it is another package's."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, PluginCommand) else command, rest


def _summary(point: EntryPoint) -> str:
    """The first line of what a command's source says of it: help=, its docstring, or its module's; not imported."""
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
    """What a statement says of `name`, when it is `def name` or `name = Typer(help=...)`."""
    match node:
        case ast.FunctionDef() if node.name == name:
            return ast.get_docstring(node)
        case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call(keywords=keywords)) if target == name:
            for keyword in keywords:
                if keyword.arg == "help" and isinstance(keyword.value, ast.Constant):
                    return str(keyword.value.value)
    return None
