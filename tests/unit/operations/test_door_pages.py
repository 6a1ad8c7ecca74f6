"""Each door for other projects' clients has a page: the server's configuration, and what changes in the client."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from jurybox.server.gateway.robots.door import _DOORS
from jurybox.server.settings.dialect_fields import FIELDS

DOCS = Path(__file__).parents[3] / "docs"
PAGES = {
    **{name: f"dialects_{name}.md" for name in FIELDS},
    **{name: "robots.md" if name == "openpi" else f"robots_{name}.md" for name in _DOORS},
}
MOST = 4  # lines that change in a client, of one kind


@pytest.mark.parametrize("speaks", PAGES)
def test_every_door_has_a_page_with_its_configuration_and_what_changes_in_the_client(speaks):
    page = (DOCS / PAGES[speaks]).read_text()
    before, told, after = page.partition("\nWhat changes in the client")
    assert told, "expected 'What changes in the client', came no such line"
    spoken = set()
    for block in re.findall(r"```toml\n(.*?)```", before, re.DOTALL):
        tables = tomllib.loads(block)
        for name, settings in (tables.get("dialects", {}) | tables.get("robots", {})).items():
            spoken.add(settings.get("speaks", name if "dialects" in tables else "openpi"))
            assert settings["model"] in tables["models"], "the configuration is whole: it can be copied"
    assert spoken == {speaks}
    if PAGES[speaks].startswith("robots"):  # a table of clients, or a client's call
        assert re.match(r".*:\n\n(<!-- .* -->\n)?(\| client|```)", after)
        return
    (lines,) = re.findall(r"```text\n(.*?)```", after.partition("\n## ")[0].partition("\nFor ")[0], re.DOTALL)
    changed = [line for line in lines.splitlines() if not line.startswith("#")]
    assert 0 < len(changed) <= MOST


def test_the_page_of_dialects_leads_to_each_of_them_by_its_fields_and_by_its_trainer():
    page = (DOCS / "dialects.md").read_text()
    by_trainer, by_fields = page.split("| `speaks` | fields | page |")
    for name, fields in FIELDS.items():
        assert f"](dialects_{name}.md), over HTTP" in by_trainer
        (row,) = re.findall(rf"^\| `{name}` \| .*\]\(dialects_{name}\.md\) \|$", by_fields, re.MULTILINE)
        assert all(re.search(rf"\b{field}\b", row) for field in fields), name
