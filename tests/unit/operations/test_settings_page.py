"""docs/settings.md lists the settings that the trainings have."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_of_settings_is_what_the_settings_are():
    spec = importlib.util.spec_from_file_location("generate_settings", ROOT / "training" / "generate_settings.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.PAGE.read_text() == generate.page(), "run: python training/generate_settings.py"
