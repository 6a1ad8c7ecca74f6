"""What `make release-check` finds wrong, each on a state that is wrong in that way. test_wheel.py builds."""

from __future__ import annotations

import datetime
import importlib.util
import re
import tomllib

import pytest
from tests.wheel.environments import ROOT

SPEC = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
assert SPEC is not None and SPEC.loader is not None
release = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(release)

TODAY = datetime.date(2026, 5, 1)
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - {date}\n\n{said}\n\n## [0.1.0] - 2026-01-01\n\n- first\n"


def test_a_version_must_be_newer_than_every_tag() -> None:
    assert release.check_version("0.2.0", ["v0.1.0", "not-a-version"]) == []
    assert "not newer than 0.2.0" in release.check_version("0.1.1", ["v0.1.0", "v0.2.0"])[0]
    assert "none by PEP 440" in release.check_version("next", [])[0]
    assert "spelled '0.2.0rc1'" in release.check_version("0.2.0-rc1", [])[0]


@pytest.mark.parametrize(
    ("date", "said", "wrong"),
    [
        ("2026-04-30", "- a change", None),
        ("2026-06-01", "- a change", "in the future"),
        ("soon", "- a change", "expected YYYY-MM-DD"),
        ("2026-04-30", "", "says nothing of 0.2.0"),
    ],
)
def test_the_changelog_has_the_version_with_its_date(date, said, wrong) -> None:
    found = release.check_changelog(CHANGELOG.format(date=date, said=said), "0.2.0", TODAY)
    assert (wrong is None and found == []) or (wrong is not None and wrong in found[0])
    assert "no section '## [0.3.0]" in release.check_changelog(CHANGELOG, "0.3.0", TODAY)[0]


def test_a_tag_elsewhere_is_named() -> None:
    assert release.check_tag("0.2.0", "a" * 40, "") == release.check_tag("0.2.0", "a" * 40, "a" * 40) == []
    assert release.check_tag("0.2.0", "a" * 40, "b" * 40) == [
        "the tag v0.2.0 is bbbbbbbbbbbb, not this commit aaaaaaaaaaaa"
    ]


def test_files_in_only_one_of_git_and_the_source_distribution_are_named() -> None:
    assert release.check_sdist({"a.py", "PKG-INFO"}, {"a.py"}) == []
    assert release.check_sdist({"a.py", "b.so"}, {"a.py", "c.py"}) == [
        "not in the source distribution: c.py",
        "in the source distribution but not in git: b.so",
    ]


def test_the_lock_has_the_versions_of_the_constraints_and_hashes() -> None:
    lock, constraints = release.LOCK.read_text(), (ROOT / "constraints.txt").read_text()
    assert release.check_lock(lock, constraints) == []
    assert len(re.findall(r"^[\w.-]+==", lock, re.MULTILINE)) > 150
    assert "make lock" in release.check_lock("numpy==1.0 \\\n    --hash=sha256:0\n", constraints)[0]
    assert "no hash" in release.check_lock("some-package==1.0\n", constraints)[0]


def test_every_package_asked_for_by_name_is_pinned_and_locked() -> None:
    names = release.asked_for(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
    pinned = {name for name, _ in release._pins((ROOT / "constraints.txt").read_text())}
    assert len(names) > 60 and names <= pinned
    lock = release.LOCK.read_text()
    assert release.check_locked(lock, names) == []
    assert release.check_locked(lock, {*names, "some-package"}) == ["the lock has no some-package: make lock"]
