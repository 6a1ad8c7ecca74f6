"""Trainings on the live page: what is read of their folders, and what is not."""

from __future__ import annotations

import os

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
