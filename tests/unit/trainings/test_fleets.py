"""Several runs from one command: which there are, how they go side by side, what they share, how they compare."""

from __future__ import annotations

import csv
import json
import socket
import subprocess
import sys

import pytest
from tests.serving import wait_until

from jurybox.processes import ControlPipe
from jurybox.training.runtime.plan import ConfigError
from jurybox.training.runtime.serving import grouped
from jurybox.training.spaces import ActionSpec, AgentSpec, Leaf
from jurybox.training.trainings import comparison, fleet
from jurybox.training.trainings.gym import GymTraining
from jurybox.training.trainings.members import FleetMember, members_of


def test_every_variation_goes_with_every_seed():
    assert members_of(None, [], {}, 3) == []
    found = members_of("0,1", ['algorithm=["ppo", "dqn"]', "gamma=[0.9, 0.99]"], {}, 3)
    assert [member.name for member in found[:3]] == [
        *("algorithm=ppo,gamma=0.9/seed-0", "algorithm=ppo,gamma=0.9/seed-1", "algorithm=ppo,gamma=0.99/seed-0"),
    ]
    assert len({member.name for member in found}) == 8
    nested = members_of(None, ["ppo.n_steps=[8, 16]"], {}, 3)[1]
    given = {"ppo": {"n_epochs": 2}, "env": "x"}
    assert nested.applied(given) == {"ppo": {"n_epochs": 2, "n_steps": 16}, "env": "x", "seed": 3}
    assert given == {"ppo": {"n_epochs": 2}, "env": "x"}
    assert members_of(None, ['env=["a:B/c-v1", "../.."]'], {}, 0)[1].name == "env=..-../seed-0", "a folder below"


@pytest.mark.parametrize(
    ("seeds", "vary", "given", "told"),
    [
        ("0,1", ["gamma"], {}, "expected a setting and two or more values"),
        ("0,1", ["gamma=0.9"], {}, "expected a setting and two or more values"),
        ("0,1", ["gamma=[0.9]"], {}, "expected a setting and two or more values"),
        ("0,1", ["seed=[1, 2]"], {}, "several seeds are --seeds"),
        ("0,1", ["gamma=[0.9, 0.99]"], {"gamma": 1}, "--vary gamma: it is set or varied in another place"),
        ("0,1", ["gamma=[0.9, 0.99]", "gamma=[1, 2]"], {}, "--vary gamma: it is set or varied in another place"),
        ("0,1", ["gamma=[0.9, 0.9]"], {}, "expected different values"),
        ("0,0", [], {}, "different whole numbers"),
        ("0,1", [], {"seed": 1}, "--seed and --seeds together"),
    ],
)
def test_what_makes_no_fleet_is_refused(seeds, vary, given, told):
    with pytest.raises(ConfigError, match=told):
        members_of(seeds, vary, given, 0)


# ---- side by side


class Started:
    """In place of a training: a process that does what it is told by the member's seed."""

    def __init__(self, folder, texts):
        self.folder, self.texts, self.most, self.living = folder, texts, 0, []

    def __call__(self, training, values, folder, member, options):
        pair = socket.socketpair()
        with (folder / f"{member.name}.log").open("w") as log:
            process = subprocess.Popen([sys.executable, "-c", self.texts[member.seed]], stdout=log, stderr=log)
        self.living = [each for each in [*self.living, process] if each.poll() is None]
        self.most = max(self.most, len(self.living))
        pair[1].close()
        return process, ControlPipe(pair[0].detach())


def together(folder, monkeypatch, texts, at_once, say=lambda text: None):
    started = Started(folder, texts)
    monkeypatch.setattr(fleet, "_started", started)
    members = {FleetMember(seed): {"seed": seed} for seed in range(len(texts))}
    return started, lambda: fleet.run_together(members, "x:Y", GymTraining(), folder, at_once, say, lambda member: {})


def test_so_many_run_side_by_side_and_one_that_fails_ends_no_other(tmp_path, monkeypatch):
    texts = ["pass", "import sys; print('no room'); sys.exit(3)", "pass"]
    started, run = together(tmp_path, monkeypatch, texts, 2)
    failed = run()
    assert {member.name: why for member, why in failed.items()} == {"seed-1": "it ended with status 3: no room"}
    assert started.most == 2


def test_a_stopped_fleet_stops_its_members(tmp_path, monkeypatch):
    sleeps = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); print('up', flush=True); time.sleep(60)"
    )
    started, run = together(tmp_path, monkeypatch, [sleeps, sleeps], 2)

    def interrupted():
        if len(started.living) == 2:
            logs = [tmp_path / f"seed-{seed}.log" for seed in (0, 1)]
            wait_until(lambda: all("up" in log.read_text() for log in logs), 20, "both to run")
            raise KeyboardInterrupt

    monkeypatch.setattr(fleet.interrupts, "check", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert [process.returncode for process in started.living] == [143, 143]


def test_members_of_one_server_are_told_its_address_and_group(tmp_path, monkeypatch):
    settings = GymTraining(policy="served", server="ipc:///run/here")
    with fleet._server_of(settings, tmp_path) as common:
        assert common["server"] == "ipc:///run/here" and common["server_group"].startswith("fleet-")
    with fleet._server_of(settings.changed(server_group="mine"), tmp_path) as common:
        assert common["server_group"] == "mine"
    with fleet._server_of(GymTraining(), tmp_path) as common:
        assert common == {}


def served(**settings):
    spec = AgentSpec((Leaf("observation", (4,), "float32"),), ActionSpec(True, 2)).as_dict()
    own = {"factory": "jurybox.training.algorithms.served_networks:gym_policy", "publish": "double_buffer"}
    return {**own, "args": {"algorithm": "ppo", "settings": settings, "spec": spec}}


def test_policies_of_one_architecture_have_one_group():
    models = {
        "one": served(hidden=[8], learning_rate=0.1),
        "two": served(hidden=[8], learning_rate=0.2),
        "wide": served(hidden=[16]),
        "remembers": served(hidden=[8], recurrent="lstm", hidden_size=4),
        "keeps": {**served(hidden=[8]), "keep_versions": 3},
    }
    found = {name: settings.get("group") for name, settings in grouped(models, "g").items()}
    assert found["one"] == found["two"] != found["wide"] and found["wide"].startswith("g-")
    assert found["remembers"] is None and found["keeps"] is None


# ---- compared


def ended(folder, member, score, curve=()):
    run = folder / member.name
    run.mkdir(parents=True)
    summary = {"env_steps": 100, "return_mean": -1.0, "seconds": 2.0, "evaluation": {"eval_return": score}}
    (run / "summary.json").write_text(json.dumps(summary))
    rows = "".join(f"{steps},{value}\n" for steps, value in curve)
    (run / "metrics.csv").write_text("env_steps,eval_return\n" + rows)


def test_variations_are_compared_by_their_last_evaluations(tmp_path):
    members = members_of("0,1,2,3", ["gamma=[0.9, 0.99]"], {}, 0)
    for place, member in enumerate(members):
        ended(tmp_path, member, float(place), [(50, place / 2), (100, place)])
    said = comparison.write(tmp_path, members, "jurybox train gym")
    assert "gamma=0.9: interquartile mean of the return 1.5, 95 % interval" in said
    assert "gamma=0.99 is better than gamma=0.9 with probability 1.00" in said
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert found["interquartile_means"]["gamma=0.99"]["mean"] == 5.5
    with (tmp_path / "seeds.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["seed"], row["gamma"], row["score"]) for row in rows[3:5]] == [
        ("3", "0.9", "3.0"),
        ("0", "0.99", "4.0"),
    ]
    report = (tmp_path / "report.html").read_text()
    assert "Which is better" in report and "While learning" in report and "Agarwal" in report


def test_environments_are_tasks_on_one_scale(tmp_path):
    members = members_of("0,1", ['env=["a", "b"]', "gamma=[0.9, 0.99]"], {}, 0)
    for member in members:
        better = member.variation["gamma"] == 0.99
        ended(tmp_path, member, (1000.0 if member.variation["env"] == "a" else 1.0) * (better + member.seed / 10))
    said = comparison.write(tmp_path, members, "")
    assert "gamma=0.9: interquartile mean of the score" in said and "env=" not in said
    means = json.loads((tmp_path / "comparison.json").read_text())["interquartile_means"]
    assert means["gamma=0.9"]["mean"] == pytest.approx(0.5 / 11) and means["gamma=0.99"]["mean"] == pytest.approx(
        10.5 / 11
    )


def test_one_run_and_runs_without_a_score_have_no_interval(tmp_path):
    members = members_of("0", ["gamma=[0.9, 0.99]"], {}, 0)
    ended(tmp_path, members[0], 2.0)
    ended(tmp_path, members[1], None)
    assert "interval" not in comparison.write(tmp_path, members[:1], "")
    assert "2 runs: return 2" in comparison.write(tmp_path, members, "")
    assert "Interquartile" not in (tmp_path / "report.html").read_text()
