"""docs/architecture.md: its walks name all files that run for a request, publication or transition; its map holds."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.models import VECTOR, Affine
from tests.serving import serving

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.training.roles.env_actor import EnvActor
from jurybox.training.trainings.gym import GymTraining, train

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
PACKAGES = {"protocol", "processes", "client", "server"}
TIMES = 40
BEGIN, END = 1000.0, 2000.0  # as the first number of a row: they start and stop the engine's profile
WATCHES = {
    "processes/__init__.py",
    "processes/surroundings.py",
    "server/logs.py",
}  # run in the engine a few times a second, with or without requests


class Profile:
    """Counts calls from and to our files while it is on: a loop that never returns is detected by its callees."""

    def __init__(self, packages=PACKAGES):
        self.calls = Counter()
        self.on, self.packages = False, packages

    def __call__(self, frame, event, _):
        if self.on and event == "call":
            for each in filter(None, (frame, frame.f_back)):
                file = each.f_code.co_filename.rpartition("/jurybox/")[2]
                self.calls[file] += file.partition("/")[0] in self.packages

    @contextmanager
    def running(self):
        sys.setprofile(self)
        self.on = True
        try:
            yield
        finally:
            self.on = False
            sys.setprofile(None)

    def files(self):
        """Return the files in which something ran every time."""
        return {file for file, calls in self.calls.items() if calls >= TIMES}


class Profiled(Affine):
    """Counts what the engine runs between two rows, in its loop and in threads started after the model was loaded."""

    def __init__(self, path):
        super().__init__(2.0, 1.0)
        self.path, self.profile = Path(path), Profile()
        threading.setprofile(self.profile)

    def forward(self, observation):
        order = float(observation[0, 0])
        if order == BEGIN:
            self.profile.calls.clear()
            sys.setprofile(self.profile)
            self.profile.on = True
        elif order == END:
            self.profile.on = False
            self.path.write_text("\n".join(self.profile.files()))
        return super().forward(observation)


def profiled(path):
    return ServedModel(Profiled(path), VECTOR, {"action": TensorSpec("float32", (4,))})


def section(heading):
    return PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def files_named_in(heading):
    """Return the Python files in the table of a section."""
    rows = [line for line in section(heading).splitlines() if line.startswith("|")]
    return {file for row in rows for file in re.findall(r"`([\w/]+\.py)`", row)}


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    """Return the files that ran for a request and for a publication, in client and engine."""
    folder = tmp_path_factory.mktemp("walks")
    listing = folder / "files"
    made = {"factory": "tests.integration.test_walks:profiled", "args": {"path": str(listing)}}
    rows = np.ones((2, 4), np.float32)
    weights = {"scale": torch.tensor(3.0), "offset": torch.tensor(0.0)}

    @contextmanager
    def engine(model):
        """Yield a set that contains at its end the files that ran in the engine meanwhile."""
        files = set()
        model.infer(np.full((1, 4), BEGIN, np.float32))
        yield files
        model.infer(np.full((1, 4), END, np.float32))
        files |= set(listing.read_text().split()) - WATCHES

    models = {"juror": made, "policy": {**made, "publish": "double_buffer"}}
    with serving(folder, models) as running, running.connect() as server:
        juror, policy, publisher = server.model("juror"), server.model("policy"), server.publisher("policy")
        requesting, publishing = Profile(), Profile()
        with engine(juror) as answering, requesting.running():
            for _ in range(TIMES):
                juror.infer(rows)
        with engine(policy) as adopting:
            for _ in range(TIMES):
                with publishing.running():
                    version = publisher.publish(weights)
                while policy.infer_reply(rows, timeout=60).version < version:
                    pass
    return requesting.files() | answering, publishing.files() | adopting


@pytest.fixture(scope="module")
def transition(tmp_path_factory):
    """Return the files that ran for each step of a serial training, without the runtime's own."""
    profile, turns, step = Profile({"training"}), iter(range(1, 1000)), EnvActor.step

    def counted(self):
        turn = next(turns)
        if turn == TIMES:  # every step is learned from by now
            sys.setprofile(profile)
        profile.on = TIMES <= turn < 2 * TIMES + 1
        if turn == 2 * TIMES + 1:
            sys.setprofile(None)
        return step(self)

    settings = GymTraining.checked(
        {"env": "Pendulum-v1", "algorithm": "sac", "steps": 3 * TIMES, "learning_starts": TIMES // 2, "batch_size": 8}
        | {"hidden": (8,), "evaluation_episodes": 1, "evaluate_every": 0, "checkpoint_every": 0}
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EnvActor, "step", counted)
        train(settings, tmp_path_factory.mktemp("transition"), serial=True)
    return {file for file in profile.files() if not file.startswith("training/runtime/")}


def test_one_transition_runs_in_the_files_that_its_walk_names_and_in_at_most_nine(transition):
    assert transition == {f"training/{file}" for file in files_named_in("The path of one transition")}
    assert len(transition) <= 9


def test_one_request_runs_in_the_files_that_its_walk_names_and_in_at_most_ten(walks):
    request, _ = walks
    assert request == files_named_in("The path of one request")
    assert len(request) <= 10


def test_one_publication_runs_in_the_files_that_its_walk_names_and_in_at_most_ten(walks):
    request, publication = walks
    named = files_named_in("The path of one publication")
    assert named <= publication
    assert publication - named <= request, "files that a request needs as well"
    assert len(named) <= 10


def test_what_the_page_says_where_to_look_is_there():
    root, rows = PAGE.parents[1], re.findall(r"^\| `([^`]+)` \| (.+) \|$", section("Where to look"), re.M)
    assert len(rows) >= 5
    for folder, text in rows:
        for name in re.findall(r"`([^`*]+[./][^`*]*)`", text):
            assert (root / folder / name).exists() or (root / name).exists(), name
