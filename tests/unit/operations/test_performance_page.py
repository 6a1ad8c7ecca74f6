"""The measurements in docs/performance.md and in the tables beside it are those of the runs it cites, all of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from argparse import Namespace
from datetime import datetime
from pathlib import Path

import pytest
from benchmarks.serving import __main__ as serving
from benchmarks.serving import crossover, page, report
from benchmarks.serving.cases import WIDTHS
from benchmarks.serving.results import Failure, Results, Window
from benchmarks.serving.rounds import BENCH, FULL

MACHINE = {"cores": 2, "cpu": "a CPU", "memory_gib": 24, "kernel": "Linux 6", "libc": "glibc 2.36", "python": "3.11.7"}


FINDINGS = page.ROOT / "benchmarks" / "serving" / "FINDINGS.md"


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="no git here")


def window(rate: float, cpu: float = 10.0) -> Window:
    return Window(rate, rate, 50.0, 90.0, 99.0, cpu, 1.0, 0.0, "", 1, 1)


def run(titles: dict[str, str]) -> Results:
    about = {
        "date": "2026-11-22T12:00:00", "command": "python -m benchmarks.serving", "commit": "abc1234",
        "machine": MACHINE, "rounds": 3, "window_s": 5.0, "titles": titles,
        "versions": {name: {"numpy": "2"} for name in titles},
    }  # fmt: skip
    return Results(about)


@pytest.mark.parametrize("name", page.PARTS)
def test_the_page_equals_its_json(name, monkeypatch):
    text = page.PAGE.read_text()
    files = page.sources(name, text)
    if any(page.age(Results.read(file)) == "" for file in files):  # no history here
        part = text[text.index(f"<!-- {name}: ") : text.index(f"<!-- end of {name} -->")]
        said = re.search(r" Since then some \d+% of the lines a request passes through are new\.", part)
        monkeypatch.setattr(page, "age", lambda results: said[0] if said else "")
    assert page.rewritten(text, name, files) == text, "write it anew: python -m benchmarks.serving.page"


@pytest.mark.parametrize("name", page.PARTS)
def test_the_figures_are_of_the_code_a_request_passes_through(name):
    for file in page.sources(name, page.PAGE.read_text()):
        commit = Results.read(file).about["commit"]
        share = page.newer(commit)
        if share is None:
            pytest.skip(f"git knows no commit {commit} here")
        assert share < 0.4, f"{share:.0%} of the lines are newer than {commit}, which {file.name} measured: make bench"


@needs_git
def test_what_is_newer_is_counted_in_lines_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "ROOT", tmp_path)
    for name in page.MEASURED:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.py").write_text("1\n" * 10)
    (tmp_path / "docs.md").write_text("1\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "all"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert page.newer("HEAD") == 0.0
    (tmp_path / "native/serving/a.py").write_text("1\n" * 10 + "2\n" * 20)
    (tmp_path / "docs.md").write_text("2\n" * 50)
    assert page.newer("HEAD") == 0.25
    results = run({})
    assert page.age(results) == "", "no commit abc1234"
    results.about["commit"] = "HEAD"
    with monkeypatch.context() as hardly:
        hardly.setattr(page, "newer", lambda commit: 0.04)
        assert page.age(results) == ""
    assert page.age(results).endswith("some 20% of the lines a request passes through are new.")


def words(text: str) -> int:
    return sum(1 for word in text.replace("|", " ").split() if re.search(r"\w", word))


def test_the_page_can_be_read_at_once_and_links_the_tables_and_the_findings():
    text = page.PAGE.read_text()
    assert words(text) <= 1300
    for name in page.PARTS:
        for file in page.sources(name, text):
            assert f"(../{file.with_suffix('.md').relative_to(page.ROOT)})" in text
    anchors = re.findall(r"FINDINGS\.md#([\w-]+)\)", text)
    headings = re.findall(r"^## (.+)$", FINDINGS.read_text(), re.M)
    there = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert len(anchors) > 3 and set(anchors) <= there


def test_every_contender_of_a_cited_run_has_its_row_in_every_table_of_its_case():
    for file in page.sources("measured", page.PAGE.read_text()):
        results, text = Results.read(file), file.with_suffix(".md").read_text()
        for point in results.points:
            # Requests a second, latency, CPU and memory.
            tables = [part for part in text.split("\n## ") if part.startswith(f"{point.case}: ")]
            rows = [
                line
                for part in tables
                for line in part.splitlines()
                if line.startswith(f"| {results.title(point.contender)} |")
            ]
            assert len(rows) >= 3, f"{point.contender} in {point.case} of {file.name}"


def test_the_tables_beside_the_page_are_those_of_the_figures():
    for file in page.sources("measured", page.PAGE.read_text()):
        text, results = file.with_suffix(".md").read_text(), Results.read(file)
        assert "\n".join(report.cases(results, "##")) in text and "\n".join(report.goal_table(results, "##")) in text
    for file in page.sources("crossover", page.PAGE.read_text()):
        tables = "\n".join(crossover.tables(Results.read(file))).rstrip()
        assert tables in file.with_suffix(".md").read_text()


def test_the_copy_in_every_client_is_measured_in_every_case_of_both_runs():
    assert all("own-copy" in names for asked in (BENCH, FULL) for names, _ in asked.values())


def test_a_contender_that_failed_is_in_the_tables_with_its_reason_below():
    results = run({"plain-zmq": "plain ZeroMQ", "mosec": "mosec"})
    results.point("vector", "plain-zmq", 4).windows.append(window(1000))
    results.failures.append(Failure("vector", "mosec", 0, "not installed"))
    text = "\n".join([*report.cases(results, "##"), *report.missing(results, "##")])
    assert text.count("| mosec | - |") == 3 and "- vector, mosec: not installed" in text


@needs_git
def test_results_that_nothing_cites_are_not_kept_and_plots_are_small():
    listed = subprocess.run(
        ["git", "ls-files", "benchmarks/serving/results"], cwd=page.ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not listed:
        pytest.skip("no git here")
    text = page.PAGE.read_text() + FINDINGS.read_text()
    for file in (Path(name) for name in listed if (page.ROOT / name).exists()):
        assert f"{file.stem}.json" in text, f"{file}: cite it or remove it"
        if file.suffix == ".svg":
            assert (page.ROOT / file).stat().st_size < 80_000


@needs_git
def test_citing_another_run_removes_the_one_before_and_names_the_new(tmp_path, monkeypatch):
    results = tmp_path / "benchmarks" / "serving" / "results"
    results.mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    cited = tmp_path / "docs" / "performance.md"
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page, "PAGE", cited)
    for stem, rate in (("2026-11-21-1200", 1000.0), ("2026-11-22-1200", 2000.0)):
        measured = run({"plain-zmq": "plain ZeroMQ"})
        measured.point("vector", "plain-zmq", 4).windows.append(window(rate))
        measured.write(results / f"{stem}.json")
    (results / "2026-11-21-1200.md").write_text("old")
    cited.write_text("before\n<!-- measured: none; x -->\n<!-- end of measured -->\nafter\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    page.cite("measured", results / "2026-11-21-1200.json")
    assert "| plain ZeroMQ | 1,000 (1.00) |" in cited.read_text()
    page.cite("measured", results / "2026-11-22-1200.json")
    text = cited.read_text()
    assert "| plain ZeroMQ | 2,000 (1.00) |" in text and "1,000" not in text
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert sorted(file.name for file in results.iterdir()) == ["2026-11-22-1200.json"]


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """A clean tree that is measured."""
    if shutil.which("git") is None:
        pytest.skip("no git here")
    for name in ("server/engine.py", "docs/performance.md", "benchmarks/serving/results/old.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("committed\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "all"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(serving, "ROOT", tmp_path)
    return tmp_path


def asked(**options: object) -> Namespace:
    return Namespace(**{"quick": False, "dirty": False, "page": False, "out": serving.RESULTS, **options})


@pytest.mark.parametrize("options", [{}, {"dirty": True}, {"quick": True, "page": True, "out": serving.ELSEWHERE}])
def test_a_run_of_a_changed_tree_or_of_short_windows_does_not_pass_for_a_result(repository, options):
    (repository / "server" / "engine.py").write_text("changed\n")
    with pytest.raises(SystemExit) as ended:
        serving.commit_measured(asked(**options))
    assert ended.value.code == 2


def test_a_measurement_of_a_changed_tree_is_marked(repository):
    (repository / "server" / "new.py").write_text("new\n")
    assert serving.commit_measured(asked(dirty=True, out=serving.ELSEWHERE)).endswith("+changes")


def test_files_of_an_earlier_run_are_no_change_of_the_tree(repository):
    (repository / "docs" / "performance.md").write_text("another run's figures\n")
    (repository / "benchmarks" / "serving" / "results" / "new.json").write_text("another run\n")
    (repository / "benchmarks" / "serving" / "results" / "old.json").unlink()
    assert not serving.commit_measured(asked(page=True)).endswith("+changes")


def test_a_tree_that_changes_while_it_is_measured_is_marked(repository):
    results = run({})
    results.about["commit"] = serving.commit_measured(asked())
    (repository / "server" / "engine.py").write_text("changed\n")
    serving.finish(results, datetime.now().astimezone())
    assert results.about["commit"].endswith("+changes")


def test_the_page_says_where_the_server_is_ahead():
    results = run({crossover.OWN: "own", crossover.SERVER: "server"})
    for width, own, server in zip(WIDTHS, (9, 7, 9, 4, 2, 1), (5, 6, 8, 5, 4, 3), strict=True):
        results.point(f"hidden{width}", crossover.OWN, 4).windows.append(window(own * 100.0))
        results.point(f"hidden{width}", crossover.SERVER, 4).windows.append(window(server * 100.0, cpu=5.0))
        results.point(f"hidden{width}", crossover.OWN, 64).windows.append(window(100.0))
        results.point(f"hidden{width}", crossover.SERVER, 64).windows.append(window(50.0 if width == 4096 else 200.0))
    said = "\n".join(crossover.answer(results))
    assert said.startswith("**With a small model and few clients the answer is: don't use a server.**")
    assert "second with 4 clients from hidden 1,024 on; with 64 clients at hidden 64, 256, 512, 1,024, 2,048." in said
    assert "less CPU a request with 4 clients at every size; with 64 clients at no size." in said
    assert re.search(r"\| \*\*500 / 400 = 1.25\*\* \|", "\n".join(crossover.tables(results)))


def test_figures_survive_the_file(tmp_path):
    results = run({"plain-zmq": "plain ZeroMQ"})
    results.point("vector", "plain-zmq", 4).windows += [window(1000.125), window(3.5)]
    results.write(tmp_path / "run.json")
    assert Results.read(tmp_path / "run.json") == results
