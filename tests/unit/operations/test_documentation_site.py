"""The documentation's site: all pages in order, all public names in the reference, no requests to other hosts.

Read as text, so that the default suite needs neither mkdocs nor an import; `make docs` builds it, and so does the slow
test.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
SOURCES = [ROOT / name for name in ("protos", "client", "server", "training", "native")]
# For other modules of ours.
NOT_PUBLIC = {"jurybox.server.settings.config", "jurybox.protocol.weights.channel", "jurybox.protocol.locks"}


class Loader(yaml.SafeLoader):
    """YAML in which Python tags are ignored."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def in_nav(entries: list[object]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            for inner in entry.values():
                yield from in_nav(inner if isinstance(inner, list) else [inner])


def test_every_page_has_its_place_in_the_order_of_reading() -> None:
    nav = list(in_nav(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]))
    assert sorted(nav) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


# ---- the reference


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


def definition(module: str, name: str) -> tuple[str, str]:
    """Where a public name is defined, and its docstring."""
    body = tree(module).body
    for i, node in enumerate(body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return module, ast.get_docstring(node) or ""
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if getattr(target, "id", "") == name:
                after = body[i + 1] if i + 1 < len(body) else None
                told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                return module, str(after.value.value) if told else ""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return definition(node.module, alias.name)
    raise LookupError(f"{module}.{name}")


def shown() -> dict[str, list[str]]:
    """The modules of the reference, with the names that are shown of each."""
    found = {}
    for page in sorted((DOCS / "api").glob("*.md")):
        for module, members in re.findall(
            r"^::: (\S+)\n(?:    options:\n      members: \[(.*)\]\n)?", page.read_text(), re.M
        ):
            found[module] = members.split(", ") if members else public_names(module)
    return found


SHOWN = shown()


def test_every_public_module_is_in_the_reference() -> None:
    modules = {
        ".".join((path.parent if path.name == "__init__.py" else path.with_suffix("")).relative_to(root).parts)
        for root in SOURCES
        for path in (root / "jurybox").rglob("*.py")
        if re.search(r"^__all__ = ", path.read_text(), re.M)
    }
    assert modules - NOT_PUBLIC == set(SHOWN)


def test_every_public_name_has_a_docstring_and_is_shown() -> None:
    there = {definition(module, name)[0] + "." + name for module, names in SHOWN.items() for name in names}
    untold, missing = [], []
    for module in SHOWN:
        for name in public_names(module):
            if is_module(f"{module}.{name}"):  # mkdocstrings shows a name that is a submodule's, too, on that one alone
                missing += [] if f"{module}.{name}" in SHOWN else [f"{module}.{name}"]
            where, docstring = definition(module, name)
            untold += [] if docstring else [f"{module}.{name}"]
            missing += [] if f"{where}.{name}" in there else [f"{module}.{name}"]
    assert untold == [] and missing == []
    assert all(public_names(module) for module in SHOWN), "a module of the reference without __all__"


def test_algorithms_name_their_sources() -> None:
    for name in ("ppo", "dqn", "iqn", "td3", "sac", "league", "td3_actor"):
        assert re.search(r"(19|20)\d\d", file_of(f"jurybox.training.algorithms.{name}").read_text()), name


# ---- the built site


@pytest.mark.slow
def test_the_site_is_complete_and_requests_no_other_host(tmp_path: Path) -> None:
    if find_spec("mkdocs") is None or find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs is not installed here: make docs")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    fetched = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\ssrc=["']?(?:https?:)?//|<link\b(?![^>]*rel=["']?"""
                         r"""canonical)[^>]*href=["']?(?:https?:)?//""")  # fmt: skip
    assert [str(path) for path, text in pages.items() if fetched.search(text)] == []
    styles = [path.read_text() for path in tmp_path.rglob("*.css")]
    assert not any(
        re.search(r"@import\s+(?:url\()?[\"']?(?:https?:)?//|url\([\"']?(?:https?:)?//", css) for css in styles
    )

    reference = "".join(text for path, text in pages.items() if path.parent.name == "api")
    for module, names in SHOWN.items():
        for name in names:  # where a name is a submodule's too, it is shown as that one's
            places = {f"{module}.{name}", f"{definition(module, name)[0]}.{name}"}
            assert any(f'id="{place}"' in reference for place in places), places
    commands = (tmp_path / "cli.html").read_text()
    for command in ("serve", "doctor", "train-gym", "train-photo", "policy-export", "edit"):
        assert f'id="jurybox-{command}"' in commands
