"""Trainings on the live page: what is read of their folders, and what is not."""

from __future__ import annotations

import os
from itertools import pairwise
from types import SimpleNamespace

import httpx
import pytest
from tests.unit.watch.test_page import Source, parsed

from jurybox.server.gateway.app import create_app
from jurybox.server.gateway.live import Broadcast, Snapshots
from jurybox.server.watch import runs as module
from jurybox.server.watch.runs import RunFolders

HEAD = "env_steps,return_mean,eval_return,lag,steps_per_second\n"


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch):
    monkeypatch.setattr(module, "_AGAIN", 0.0)


def begun(folder, rows, *films, at=1_000):
    (folder / "films").mkdir(parents=True)
    (folder / "metrics.csv").write_text(HEAD + "".join(f"{row}\n" for row in rows))
    os.utime(folder / "metrics.csv", (at, at))
    for film in films:
        (folder / "films" / film).write_bytes(film.encode())
    return folder


def test_the_numbers_and_the_newest_film_of_each_run_are_told_the_newest_first(tmp_path):
    begun(
        tmp_path / "a" / "seed-0",
        ["10,1.5,,2,300", "20,,7.5,,", "30,2.5,,0,310"],
        "9.webm",
        "20.webm",
        "x.webm",
        ".30.webm",
    )
    begun(tmp_path / "b", ["10,-1,,,"], at=2_000)
    found = RunFolders(tmp_path).document()
    assert [run["name"] for run in found] == ["b", "a/seed-0"]
    numbers = {"env_steps": 30, "return": 2.5, "returns": [1.5, 2.5], "evaluated": 7.5, "lag": 0, "film": "20"}
    assert {name: found[1][name] for name in numbers} == numbers
    assert found[0]["evaluated"] is None and found[0]["film"] == "" and found[0]["returns"] == [-1]
    assert RunFolders(tmp_path / "b").document()[0]["name"] == "b", "the folder may be a run itself"


def test_a_run_that_goes_on_is_read_again_and_an_unfinished_line_is_not(tmp_path):
    runs = RunFolders(begun(tmp_path / "run", ["10,1,,,"]))
    assert runs.document()[0]["env_steps"] == 10
    with (tmp_path / "run" / "metrics.csv").open("a") as file:
        file.write("20,3,,,\n30,9")
    assert runs.document()[0]["returns"] == [1, 3]


def test_long_runs_are_few_points_and_the_last_is_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MOST_BYTES", 2_000)
    begun(tmp_path, [f"{step},{step},,," for step in range(1_000)])
    (found,) = RunFolders(tmp_path).document()
    assert len(found["returns"]) <= 120 and found["returns"][-1] == 999
    assert found["returns"][0] > 700, "of a large file the end is read"


def test_what_is_no_run_or_damaged_is_left_out(tmp_path):
    begun(tmp_path / "a" / "b" / "c" / "too deep", ["1,1,,,"])
    (tmp_path / "link").symlink_to(begun(tmp_path.parent / "elsewhere", ["1,1,,,"]))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").write_bytes(b"env_steps,return_mean\nx,nan\n\xff,inf\n5,1\n")
    (found,) = RunFolders(tmp_path).document()
    assert found["name"] == "run" and (found["env_steps"], found["returns"]) == (5, [1])
    for _ in range(module._MOST_RUNS):
        begun(tmp_path / f"more-{_}", ["1,1,,,"])
    assert len(RunFolders(tmp_path).document()) == module._MOST_RUNS
    assert RunFolders(tmp_path / "nowhere").document() == []


def test_a_film_is_that_of_a_run_that_is_shown_and_no_other_file(tmp_path, monkeypatch):
    run = begun(tmp_path / "run", ["1,1,,,"], "5.webm")
    runs = RunFolders(tmp_path)
    assert runs.film("run") is None, "nothing was shown yet"
    runs.document()
    assert runs.film("run") == b"5.webm"
    assert runs.film("../run") is None and runs.film("run/films/5.webm") is None
    (tmp_path / "secret").write_text("secret")
    (run / "films" / "6.webm").symlink_to(tmp_path / "secret")
    runs.document()
    assert runs.film("run") is None, "a link is not followed"
    (run / "films" / "6.webm").unlink()
    monkeypatch.setattr(module, "_MOST_FILM", 4)
    runs.document()
    assert runs.film("run") is None, "larger than a browser should get"


def test_files_are_looked_at_every_two_seconds_at_most(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, time=lambda: 1_004.0)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "_AGAIN", 2.0)
    begun(tmp_path / "a", ["10,1,,,"])
    runs = RunFolders(tmp_path)
    assert [(run["name"], run["age"]) for run in runs.document()] == [("a", 4.0)], "the first look is at once"
    begun(tmp_path / "b", ["10,1,,,"], at=1_002)
    found = []
    for clock.now in (1.9, 2.0, 3.9):
        found.append([run["name"] for run in runs.document()])
    assert found == [["a"], ["b", "a"], ["b", "a"]]


def test_a_run_that_has_not_changed_is_not_read_again(tmp_path):
    runs = RunFolders(begun(tmp_path / "run", ["10,1,,,"]))
    assert runs.document()[0]["returns"] == [1]
    file = tmp_path / "run" / "metrics.csv"
    for row, at, returns in (("10,2,,,", 1_000, [1]), ("10,3,,,", 1_001, [3]), ("10,44,,,", 1_001, [44])):
        file.write_text(f"{HEAD}{row}\n")
        os.utime(file, (at, at))
        assert runs.document()[0]["returns"] == returns


@pytest.mark.parametrize(
    ("points", "first", "shown"), [(1, 0, 1), (120, 0, 120), (121, 0, 61), (240, 1, 120), (241, 0, 81)]
)
def test_at_most_120_points_are_told_evenly_and_up_to_the_newest(tmp_path, points, first, shown):
    begun(tmp_path, [f"{step},{step},,," for step in range(points)])
    returns = RunFolders(tmp_path).document()[0]["returns"]
    assert (returns[0], returns[-1], len(returns)) == (first, points - 1, shown)
    assert len({later - earlier for earlier, later in pairwise(returns)}) <= 1


def test_a_run_three_folders_down_is_told_and_what_is_in_a_run_is_none(tmp_path):
    begun(tmp_path / "a" / "b" / "c", ["1,1,,,"])
    begun(tmp_path / "a" / "b" / "c" / "d", ["1,1,,,"])
    assert [run["name"] for run in RunFolders(tmp_path).document()] == ["a/b/c"]


def test_a_limited_number_of_folders_is_looked_at(tmp_path, monkeypatch):
    for number in range(4):
        begun(tmp_path / f"run-{number}", ["1,1,,,"])
    monkeypatch.setattr(module, "_MOST_LOOKED_AT", 3)
    assert sorted(run["name"] for run in RunFolders(tmp_path).document()) == ["run-0", "run-1"]


@pytest.mark.parametrize(("size", "sent"), [(4, True), (5, False)])
def test_a_film_of_the_largest_size_is_sent_whole(tmp_path, monkeypatch, size, sent):
    monkeypatch.setattr(module, "_MOST_FILM", 4)
    film = begun(tmp_path / "run", ["1,1,,,"], "5.webm") / "films" / "5.webm"
    film.write_bytes(b"x" * size)
    runs = RunFolders(tmp_path)
    runs.document()
    assert runs.film("run") == (b"x" * size if sent else None)
    film.unlink()
    assert runs.film("run") is None
    os.mkfifo(film)
    assert runs.film("run") is None, "nothing waits for who would write to it"


def test_a_large_file_is_read_from_its_end_without_a_part_of_a_line(tmp_path, monkeypatch):
    rows = [f"{step},{step + 100},,," for step in range(20)]
    whole = sum(len(row) + 1 for row in rows)
    begun(tmp_path, rows)
    for most, first in ((whole, 100), (whole - 1, 101), (100, 111)):
        monkeypatch.setattr(module, "_MOST_BYTES", most)
        returns = RunFolders(tmp_path).document()[0]["returns"]
        assert (returns[0], returns[-1]) == (first, 119), most


async def test_the_gateway_streams_them_and_serves_the_film(scene, tmp_path):
    begun(tmp_path / "run", ["10,1.5,,2,300"], "10.webm")
    app = create_app(Source(scene), runs=tmp_path)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        stream = app.state.watching._broadcast.stream()
        kind, document = parsed(await anext(stream))
        assert kind == "sample" and [run["name"] for run in document["runs"]] == ["run"]
        await stream.aclose()
        film = await client.get("/runs/film", params={"name": "run", "at": "10"})
        assert (film.status_code, film.headers["content-type"], film.content) == (200, "video/webm", b"10.webm")
        none = await client.get("/runs/film", params={"name": "other"})
        assert none.status_code == 404 and "film = true" in none.json()["error"]
    app.state.watching.close()


async def test_a_server_without_runs_shows_none(scene):
    broadcast = Broadcast(Snapshots(Source(scene)))
    stream = broadcast.stream()
    assert parsed(await anext(stream))[1]["runs"] == []
    await stream.aclose()
    broadcast.close()
