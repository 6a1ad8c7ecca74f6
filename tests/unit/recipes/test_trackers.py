import io
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from jurybox.training.recipes import progress as module
from jurybox.training.recipes.progress import ConsoleProgress, TrackerMissing, require, trackers


def installed(monkeypatch, name, fake):
    monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda package: package == name or None)


def test_none_is_asked_for_by_default(tmp_path):
    assert trackers("photo", tmp_path, {}) == []


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_one_that_is_not_installed_is_an_error_that_says_how_to_install_it(monkeypatch, name):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(TrackerMissing, match=rf"jurybox\[{name}\]"):
        require(**{"mlflow": False, "wandb": False, name: True})


def test_mlflow_gets_parameters_numbers_and_files(tmp_path, monkeypatch):
    heard = []

    def hears(name):
        return lambda *given, **named: heard.append((name, *given, *named.values()))

    calls = ("set_tracking_uri", "set_experiment", "start_run", "log_params", "log_metrics", "log_artifact", "end_run")
    installed(
        monkeypatch,
        "mlflow",
        SimpleNamespace(is_tracking_uri_set=lambda: False, **{name: hears(name) for name in calls}),
    )
    (tracker,) = trackers("photo", tmp_path, {"steps": 5}, mlflow=True)
    tracker.scalars(10, {"loss": 1.0})
    tracker.finish({"env_steps": 10, "version": "0.1"}, [tmp_path / "report.html"])
    assert ("log_params", {"steps": 5}) in heard
    assert ("log_metrics", {"loss": 1.0}, 10) in heard
    assert ("log_metrics", {"summary_env_steps": 10}) in heard
    assert heard[-2:] == [("log_artifact", str(tmp_path / "report.html")), ("end_run",)]
    assert heard[0] == ("set_tracking_uri", (tmp_path / "mlruns").as_uri())


def test_weights_and_biases_gets_them_too(tmp_path, monkeypatch):
    heard = []
    run = SimpleNamespace(
        log=lambda values, step: heard.append((values, step)),
        summary={},
        save=lambda path, policy: heard.append(path),
        finish=lambda: heard.append("finished"),
    )
    installed(monkeypatch, "wandb", SimpleNamespace(init=lambda **named: heard.append(named["config"]) or run))
    (tracker,) = trackers("photo", tmp_path, {"steps": 5}, wandb=True)
    tracker.scalars(10, {"loss": 1.0})
    tracker.finish({"env_steps": 10}, [tmp_path / "report.html"])
    assert heard == [{"steps": 5}, ({"loss": 1.0}, 10), str(tmp_path / "report.html"), "finished"]
    assert run.summary == {"env_steps": 10}


def test_a_path_with_brackets_is_printed_as_it_is():
    text = io.StringIO()
    ConsoleProgress(Console(file=text, width=200)).log("the run is in /runs/a[b] and [/c]")
    assert text.getvalue() == "the run is in /runs/a[b] and [/c]\n"
