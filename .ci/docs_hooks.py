"""Additions to mkdocs for `make docs`.

- `cli.md` gets the help of every command, from the command line itself, so that it cannot be out of date.
- A link from a page to a file outside docs/ leads to a copy of it in the site; text gets the ending .txt, which
  browsers show.
- Drawings (SVG) are inlined, so that their colours follow the page's.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\((?P<up>(?:\.\./)+)(?P<path>[\w./-]+)(?:#[\w-]+)?\)")
DRAWING = re.compile(r'<img alt="(?P<alt>[^"]*)" src="(?:\.\./)*images/(?P<name>[\w-]+\.drawing\.svg)" ?/?>')
COMMANDS = "<!-- commands -->"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page in files.documentation_pages():
        for found in OUTSIDE.finditer(page.content_string):
            if path := outside(found, page.src_uri):
                copy(path, files, config)
    return files


def copy(path: str, files: Files, config: MkDocsConfig) -> None:
    """Copy a file of the repository to the site; a folder with its content, and a page that lists it."""
    if (ROOT / path).is_dir():
        files_there = sorted(each for each in (ROOT / path).rglob("*.*") if each.is_file())
        inner = [str(each.relative_to(ROOT)) for each in files_there if each.suffix != ".pyc"]
        for file in inner:
            copy(file, files, config)
        links = "".join(
            f'<li><a href="{os.path.relpath(shown_as(file), f"repository/{path}")}">{file}</a></li>' for file in inner
        )
        if inner and shown_as(path) not in files.src_uris:
            head = (
                f"<title>{path}</title><link rel=icon href='data:,'><meta name=viewport content='width=device-width'>"
            )
            page = f"<!doctype html>{head}<ul>{links}</ul>"
            files.append(File.generated(config, shown_as(path), content=page))
    elif (ROOT / path).is_file() and shown_as(path) not in files.src_uris:
        files.append(File.generated(config, shown_as(path), abs_src_path=str(ROOT / path)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def copied(found: re.Match[str]) -> str:
        path, depth = outside(found, page.file.src_uri), page.file.src_uri.count("/")
        return f"]({'../' * depth}{shown_as(path)})" if path else found[0]

    markdown = OUTSIDE.sub(copied, markdown)
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, "\n".join(command_lines()))
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def drawing(found: re.Match[str]) -> str:
        file = Path(config.docs_dir) / "images" / found["name"]
        return file.read_text().replace("<svg ", f'<svg role="img" aria-label="{found["alt"]}" ', 1)

    return DRAWING.sub(drawing, html)


def outside(found: re.Match[str], page: str) -> str:
    """The path in the repository of a link out of docs/; "" for other links."""
    return found["path"] if found["up"].count("/") > page.count("/") else ""


def shown_as(path: str) -> str:
    """The place of a repository's file in the site."""
    if (ROOT / path).is_dir():
        return f"repository/{path.rstrip('/')}/index.html"
    picture = path.endswith((".svg", ".png", ".jpg"))
    return f"repository/{path}" if picture else f"repository/{path}.txt"


def command_lines() -> list[str]:
    """The page of the command line, as Markdown: every command with its help, arguments and options."""
    from typer.core import TyperGroup
    from typer.main import get_command

    from jurybox.server.commands.app import PluginCommand, app

    lines: list[str] = []

    def describe(command: Any, words: list[str]) -> None:
        if isinstance(command, PluginCommand):  # another package's, imported when it is used
            command = command.load()
        context = command.context_class(command, info_name=" ".join(words))
        usage = " ".join([*words, *command.collect_usage_pieces(context)])
        lines.extend([f"{'#' * min(len(words) + 1, 4)} {' '.join(words)}", "", plain(command.help)])
        lines.extend(["", "```text", usage, "```", ""])
        if rows := [row for each in command.get_params(context) if (row := row_of(each, context))]:
            lines.extend(["| | | default |", "| --- | --- | --- |", *rows, ""])
        inner = {}
        if isinstance(command, TyperGroup):
            found = {name: command.get_command(context, name) for name in command.list_commands(context)}
            inner = {name: each for name, each in found.items() if each is not None and not each.hidden}
        for name, each in inner.items():
            summary = plain(each.help).split("\n\n")[0]
            lines.append(f"- [`{' '.join([*words, name])}`](#{'-'.join([*words, name])}): {summary}")
        lines.append("")
        for name, each in inner.items():
            describe(each, [*words, name])

    describe(get_command(app), ["jurybox"])
    return lines


def row_of(parameter: Any, context: Any) -> str:
    """A row of a command's table; empty for common and hidden options."""
    if parameter.name in {"help", "install_completion", "show_completion"} or getattr(parameter, "hidden", False):
        return ""
    if parameter.param_type_name == "argument":
        names = f"`{' '.join(parameter.get_usage_pieces(context)).strip('[]')}`"
    else:
        names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    default = parameter.default
    shown = "" if default in (None, (), [], "") or callable(default) or default is False else f"`{default}`"
    return f"| {names} | {plain(getattr(parameter, 'help', '')).replace('|', chr(92) + '|')} | {shown} |"


def plain(text: str | None) -> str:
    """A help text with each paragraph on one line, without terminal markup."""
    return "\n\n".join(" ".join(part.split()) for part in (text or "").replace("\b", "").split("\n\n"))
