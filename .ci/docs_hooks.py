"""Additions to mkdocs for `make docs`.

- Of the API's pages, mkdocstrings shows the modules; in the repository docs_pages.py has written them into the pages.
- A link from a page to a file outside docs/ leads to a copy of it in the site; text gets the ending .txt, which
  browsers show.
- Drawings (SVG) are inlined, so that their colours follow the page's.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

from docs_pages import MODULE

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\((?P<up>(?:\.\./)+)(?P<path>[\w./-]+)(?:#[\w-]+)?\)")
DRAWING = re.compile(r'<img alt="(?P<alt>[^"]*)" src="(?:\.\./)*images/(?P<name>[\w-]+\.drawing\.svg)" ?/?>')


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
    return MODULE.sub(directive, markdown)


def directive(found: re.Match[str]) -> str:
    """Return mkdocstrings's directive for a generated part of the API."""
    members = f"\n    options:\n      members: [{found['names']}]" if found["names"] else ""
    return f"::: {found['module']}{members}\n"


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
