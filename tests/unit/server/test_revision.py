"""The source revision, from wherever it is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from jurybox.protocol.revision import checked_out, source_revision

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def git(tmp_path) -> Path:
    (tmp_path / "refs" / "heads").mkdir(parents=True)
    (tmp_path / "HEAD").write_text("ref: refs/heads/main\n")
    return tmp_path


def test_a_branch_with_its_own_commit(git):
    (git / "refs" / "heads" / "main").write_text(f"{COMMIT}\n")
    assert checked_out(git) == COMMIT


def test_a_packed_branch(git):
    (git / "packed-refs").write_text(
        f"# pack-refs with: peeled\n{'f' * 40} refs/heads/other\n{COMMIT} refs/heads/main\n"
    )
    assert checked_out(git) == COMMIT


def test_a_worktree(git, tmp_path):
    (git / "refs" / "heads" / "main").write_text(f"{COMMIT}\n")
    own, tree = git / "worktrees" / "other", tmp_path / "other"
    own.mkdir(parents=True)
    tree.mkdir()
    (own / "HEAD").write_text("ref: refs/heads/main\n")
    (own / "commondir").write_text("../..\n")
    (tree / ".git").write_text(f"gitdir: {own}\n")
    assert checked_out(tree / ".git") == COMMIT


def test_a_detached_head(git):
    (git / "HEAD").write_text(f"{COMMIT}\n")
    assert checked_out(git) == COMMIT


def test_a_folder_without_a_repository_has_no_revision(git, tmp_path):
    assert checked_out(git) is None  # a branch without a commit yet
    (git / "HEAD").write_text("something else\n")
    assert checked_out(git) is None
    assert checked_out(tmp_path / "absent") is None


def test_the_variable_of_a_build_comes_first(monkeypatch):
    source_revision.cache_clear()
    monkeypatch.setenv("JURYBOX_REVISION", "release-7")
    assert source_revision() == "release-7"
    source_revision.cache_clear()
