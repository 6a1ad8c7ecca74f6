"""The documentation's site: all pages in order, all public names in the reference, no requests to other hosts.

Read as text, so that the default suite needs neither mkdocs nor an import; `make docs` builds it, and so does the slow
test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
SOURCES = [ROOT / name for name in ("protos", "client", "server", "training", "native")]


def _docs_pages() -> ModuleType:
    spec = spec_from_file_location("docs_pages", ROOT / ".ci" / "docs_pages.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


docs_pages = _docs_pages()
definition, file_of, is_module, public_names = (
    docs_pages.definition, docs_pages.file_of, docs_pages.is_module, docs_pages.public_names
)  # fmt: skip
# For other modules of ours.
NOT_PUBLIC = {"jurybox.server.settings.config", "jurybox.protocol.weights.channel", "jurybox.protocol.locks"}


@cache
def written_pages() -> dict[str, str]:
    return {str(page.relative_to(ROOT)): text for page, text in docs_pages.pages()}


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


@pytest.mark.parametrize("path", ["docs/cli.md", *(f"docs/api/{page.name}" for page in (DOCS / "api").glob("*.md"))])
def test_the_pages_of_the_command_line_and_the_api_are_what_these_are(path: str) -> None:
    assert (ROOT / path).read_text() == written_pages()[path], "run: make reference"


def test_every_part_of_a_generated_page_is_between_its_comments() -> None:
    for page in (DOCS / "api").glob("*.md"):
        text = page.read_text()
        assert text.count("<!-- api: ") == text.count("<!-- end of ") == len(docs_pages.MODULE.findall(text))


def shown() -> dict[str, list[str]]:
    """The modules of the reference, with the names that are shown of each."""
    text = "".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
    return {
        found["module"]: found["names"].split(", ") if found["names"] else public_names(found["module"])
        for found in docs_pages.MODULE.finditer(text)
    }


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
    there = {f"{definition(module, name)[0]}.{name}" for module, names in SHOWN.items() for name in names}
    untold, missing = [], []
    for module in SHOWN:
        for name in public_names(module):
            if is_module(f"{module}.{name}"):  # mkdocstrings shows a name that is a submodule's, too, on that one alone
                missing += [] if f"{module}.{name}" in SHOWN else [f"{module}.{name}"]
            where, _, docstring = definition(module, name)
            untold += [] if docstring else [f"{module}.{name}"]
            missing += [] if f"{where}.{name}" in there else [f"{module}.{name}"]
    assert untold == [] and missing == []
    assert all(public_names(module) for module in SHOWN), "a module of the reference without __all__"


def test_algorithms_name_their_sources() -> None:
    names = [f"training.algorithms.{name}" for name in ("ppo", "dqn", "iqn", "td3", "sac", "acting")]
    for name in (*names, "studies.hockey.league"):
        assert re.search(r"(19|20)\d\d", file_of(f"jurybox.{name}").read_text()), name


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
