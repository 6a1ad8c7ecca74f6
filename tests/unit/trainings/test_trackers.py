import io
import re
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from jurybox.protocol.revision import install_command
from jurybox.training.trainings import progress as module
from jurybox.training.trainings.progress import ConsoleProgress, TrackerMissing, require, trackers


def installed(monkeypatch, name, fake):
    monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda package: package == name or None)


def test_none_is_asked_for_by_default(tmp_path):
    assert trackers("photo", tmp_path, {}) == []


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_one_that_is_not_installed_is_an_error_that_says_how_to_install_it(monkeypatch, name):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(TrackerMissing, match=re.escape(install_command(name))):
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


def test_mlflow_gets_only_names_that_it_allows(tmp_path, monkeypatch):
    heard = {}

    def log_metrics(values, step=0):
        assert all(re.fullmatch(r"[/\w.\- ]+", name) for name in values), "what MLflow raises an error for"
        heard.update(values)

    calls = ("set_tracking_uri", "set_experiment", "start_run", "log_params", "log_artifact", "end_run")
    fake = SimpleNamespace(is_tracking_uri_set=lambda: True, **dict.fromkeys(calls, lambda *_, **__: None))
    installed(monkeypatch, "mlflow", SimpleNamespace(**vars(fake), log_metrics=log_metrics))
    (tracker,) = trackers("marl", tmp_path, {}, mlflow=True)
    tracker.scalars(10, {"loss_agent_0+agent_1": 1.0, "audit/é.1-b c": 2.0})
    tracker.finish({"a+b": 3}, [])
    assert heard == {"loss_agent_0_agent_1": 1.0, "audit/é.1-b c": 2.0, "summary_a_b": 3}


class WandbRun:
    """Like W&B's, drops what is logged at a smaller step than the last."""

    def __init__(self):
        self.step, self.rows, self.axes = 0, [], {}

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def log(self, values, step=None):
        if step is None or step >= self.step:
            self.step = self.step + 1 if step is None else step
            self.rows.append(values)


def test_weights_and_biases_keeps_an_evaluation_that_began_before_the_last_row(tmp_path, monkeypatch):
    run = WandbRun()
    installed(monkeypatch, "wandb", SimpleNamespace(init=lambda **_: run))
    (tracker,) = trackers("gym", tmp_path, {}, wandb=True)
    tracker.scalars(2000, {"loss": 1.0})
    tracker.scalars(1000, {"eval_return": 5.0})
    assert run.rows == [{"env_steps": 2000, "loss": 1.0}, {"env_steps": 1000, "eval_return": 5.0}]
    assert run.axes == {"env_steps": None, "*": "env_steps"}


def test_weights_and_biases_gets_them_too(tmp_path, monkeypatch):
    heard = []
    run = SimpleNamespace(
        define_metric=lambda *_, **__: None,
        log=heard.append,
        summary={},
        save=lambda path, policy: heard.append(path),
        finish=lambda: heard.append("finished"),
    )
    installed(monkeypatch, "wandb", SimpleNamespace(init=lambda **named: heard.append(named["config"]) or run))
    (tracker,) = trackers("photo", tmp_path, {"steps": 5}, wandb=True)
    tracker.scalars(10, {"loss": 1.0})
    tracker.finish({"env_steps": 10}, [tmp_path / "report.html"])
    assert heard == [{"steps": 5}, {"env_steps": 10, "loss": 1.0}, str(tmp_path / "report.html"), "finished"]
    assert run.summary == {"env_steps": 10}


def test_a_path_with_brackets_is_printed_as_it_is():
    text = io.StringIO()
    ConsoleProgress(Console(file=text, width=200)).log("the run is in /runs/a[b] and [/c]")
    assert text.getvalue() == "the run is in /runs/a[b] and [/c]\n"
