"""Write the generated parts of docs/cli.md and docs/api/*.md: python .ci/docs_pages.py (or `make reference`).

A page of the API has, for every module, a part between two comments, the first of which names the module and, where not
all of it is meant, its names. The parts are Markdown, so that they can be read wherever the repository is shown; the
site (docs_hooks.py) has mkdocstrings show the same modules instead.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCES = [ROOT / name for name in ("protos", "client", "server", "training", "native")]
MODULE = re.compile(
    r"<!-- api: (?P<module>\S+?)(?: \[(?P<names>.*?)\])? -->\n(?:.*?\n)?<!-- end of (?P=module) -->", re.S
)
COMMANDS = re.compile(r"<!-- commands -->\n(?:.*?\n)?<!-- end of commands -->", re.S)
_SECTION = re.compile(r"(Args|Attributes|Example|Raises|Returns):$")
_OF_SETTING = "[default:\N{NO-BREAK SPACE}"  # in the help of a training's settings, which have a page
_WIDE = 100  # a longer signature has a line for each parameter

Function = ast.FunctionDef | ast.AsyncFunctionDef


def pages() -> Iterator[tuple[Path, str]]:
    """Every page with generated parts, and what it has to be."""
    for path in (DOCS / "cli.md", *sorted((DOCS / "api").glob("*.md"))):
        text = COMMANDS.sub(lambda _: "\n".join(["<!-- commands -->", *command_lines(), "<!-- end of commands -->"]),
                            path.read_text())  # fmt: skip
        yield path, MODULE.sub(_module_part, text)


def main() -> int:
    for path, text in pages():
        if path.read_text() != text:
            path.write_text(text)
            sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")
    return 0


# ---- the API


def _module_part(found: re.Match[str]) -> str:
    module, names = found["module"], found["names"]
    head = f"<!-- api: {module}{f' [{names}]' if names else ''} -->"
    lines = [head, f'## <a id="{module}"></a>`{module}`', "", *prose(ast.get_docstring(tree(module)))]
    for name in names.split(", ") if names else public_names(module):
        if not is_module(f"{module}.{name}"):  # a name that is a submodule's, too, is shown with that one
            lines += _entry(module, name)
    return "\n".join([*lines, f"<!-- end of {module} -->"])


def _entry(module: str, name: str) -> list[str]:
    where, node, doc = definition(module, name)
    anchors = f'<a id="{module}.{name}"></a>' + (f'<a id="{where}.{name}"></a>' if where != module else "")
    lines = [f"### {anchors}`{name}`", ""]
    if isinstance(node, ast.ClassDef):
        lines += [*code("\n".join([f"class {name}{_bases(node)}", *_fields(node)])), *prose(doc)]
        for each in node.body:
            if isinstance(each, Function) and not each.name.startswith("_") and not _setter(each):
                lines += [f'#### <a id="{where}.{name}.{each.name}"></a>`{name}.{each.name}`', ""]
                lines += [] if _property(each) else code(signature(each, method=True))
                kind = f"Property: `{ast.unparse(each.returns)}`." if _property(each) and each.returns else ""
                lines += ([kind, ""] if kind else []) + prose(ast.get_docstring(each))
            elif isinstance(each, Function) and each.name == "__init__" and each.args.args[1:] + each.args.kwonlyargs:
                lines += [
                    *code(signature(each, method=True).replace("__init__", name, 1)),
                    *prose(ast.get_docstring(each)),
                ]
        return lines
    if isinstance(node, Function):
        return [*lines, *code(signature(node)), *prose(doc)]
    return [*lines, *code(ast.unparse(node)), *prose(doc)]


def _bases(node: ast.ClassDef) -> str:
    bases = [ast.unparse(base) for base in node.bases if ast.unparse(base) != "object"]
    return f"({', '.join(bases)})" if bases else ""


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """What the class declares: a dataclass's fields with their defaults, the members of an enumeration."""
    declared = any("dataclass" in ast.unparse(each) for each in node.decorator_list) or "Enum" in _bases(node)
    for each in node.body:
        target = (
            each.target
            if isinstance(each, ast.AnnAssign)
            else each.targets[0]
            if isinstance(each, ast.Assign)
            else None
        )
        if declared and isinstance(target, ast.Name) and not target.id.startswith("_"):
            yield f"    {ast.unparse(each)}"


def _property(node: Function) -> bool:
    return any("property" in ast.unparse(each) for each in node.decorator_list)


def _setter(node: Function) -> bool:
    return any(ast.unparse(each).endswith((".setter", "overload")) for each in node.decorator_list)


def signature(node: Function, *, method: bool = False) -> str:
    """A function's signature, on one line if it fits."""
    static = any("staticmethod" in ast.unparse(each) for each in node.decorator_list)
    parts = parameters(node.args)[1 if method and not static else 0 :]
    returned = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    start = f"{'async ' if isinstance(node, ast.AsyncFunctionDef) else ''}{node.name}"
    line = f"{start}({', '.join(parts)}){returned}"
    return line if len(line) <= _WIDE else "\n".join([f"{start}(", *(f"    {part}," for part in parts), f"){returned}"])


def parameters(of: ast.arguments) -> list[str]:
    """The parameters of a function, each with its type and default."""

    def shown(one: ast.arg, default: ast.expr | None = None, stars: str = "") -> str:
        typed = f": {ast.unparse(one.annotation)}" if one.annotation else ""
        return f"{stars}{one.arg}{typed}" + (f" = {ast.unparse(default)}" if default else "")

    places = [*of.posonlyargs, *of.args]
    defaults = [*[None] * (len(places) - len(of.defaults)), *of.defaults]
    found = [shown(one, default) for one, default in zip(places, defaults, strict=True)]
    if of.posonlyargs:
        found.insert(len(of.posonlyargs), "/")
    if of.vararg:
        found.append(shown(of.vararg, stars="*"))
    elif of.kwonlyargs:
        found.append("*")
    found += [shown(one, default) for one, default in zip(of.kwonlyargs, of.kw_defaults, strict=True)]
    return found + ([shown(of.kwarg, stars="**")] if of.kwarg else [])


def code(text: str) -> list[str]:
    return ["```python", text, "```", ""]


def prose(docstring: str | None) -> list[str]:
    """A docstring in Google's style as Markdown."""
    lines: list[str] = []
    name, inside = "", list[str]()
    for line in [*cleandoc(docstring or "").splitlines(), "."]:
        if name and not (line.startswith("    ") or not line):
            lines += _of_section(name, [each[4:] for each in inside])
            name = ""
        if name:
            inside.append(line)
        elif found := _SECTION.match(line):
            name, inside = found[1], []
        else:
            lines.append(line)
    return [*"\n".join(lines[:-1]).strip().splitlines(), ""] if docstring else []


def _of_section(name: str, lines: list[str]) -> list[str]:
    if name == "Example":
        text = "\n".join(lines).strip("\n")
        return ["**Example**", "", *([text] if "```" in text else code(text)), ""]
    items: list[str] = []
    for line in lines:
        if line.startswith(" ") and items:
            items[-1] += f" {line.strip()}"
        elif line.strip():
            items.append(line.strip())
    if name == "Returns":
        return [f"**Returns** {' '.join(items)}", ""]
    return [f"**{name}**", "", *(f"- {_named(item)}" for item in items), ""]


def _named(item: str) -> str:
    names, colon, meaning = item.partition(": ")
    return f"`{names}`: {meaning}" if colon and re.fullmatch(r"[\w*., ]+", names) else item


def is_module(name: str) -> bool:
    try:
        return bool(file_of(name))
    except FileNotFoundError:
        return False


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(file_of(module).read_text())


def file_of(module: str) -> Path:
    for root in SOURCES:
        stem = root / module.replace(".", "/")
        for path in (stem / "__init__.py", stem.with_suffix(".py"), stem.with_suffix(".pyi")):
            if path.is_file():
                return path
    raise FileNotFoundError(module)


def public_names(module: str) -> list[str]:
    for node in tree(module).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def definition(module: str, name: str) -> tuple[str, ast.stmt, str]:
    """The module that defines a public name, the definition, and its docstring."""
    body = tree(module).body
    for i, node in enumerate(body):
        if isinstance(node, ast.ClassDef | Function) and node.name == name:
            return module, node, ast.get_docstring(node) or ""
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if getattr(target, "id", "") == name:
                after = body[i + 1] if i + 1 < len(body) else None
                told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                return module, node, str(after.value.value) if told else ""  # type: ignore[union-attr]
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return definition(node.module, alias.name)
    raise LookupError(f"{module}.{name}")


# ---- the command line


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
        shown = [each for each in command.get_params(context) if _OF_SETTING not in (getattr(each, "help", None) or "")]
        if rows := [row for each in shown if (row := row_of(each, context))]:
            lines.extend(["| | | default |", "| --- | --- | --- |", *rows, ""])
        if len(shown) < len(command.get_params(context)):
            lines.extend([f"Its [settings](settings.md#{words[-1]}) are flags, too.", ""])
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


if __name__ == "__main__":
    sys.exit(main())
