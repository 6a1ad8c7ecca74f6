"""docs/architecture.md: its walks name every file that runs for a request and a publication, its map every module."""

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

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
PACKAGES = {"protocol", "processes", "client", "server"}
TIMES = 40
BEGIN, END = 1000.0, 2000.0  # as the first number of a row: what the engine's profile is told
WATCHES = {"processes/__init__.py", "server/logs.py"}  # run in the engine's loop a hundred times a second, asked or not


class Profile:
    """Counts calls from and to files of ours while it is on: a loop that never returns is seen by what it calls."""

    def __init__(self):
        self.calls = Counter()
        self.on = False

    def __call__(self, frame, event, _):
        if self.on and event == "call":
            for each in filter(None, (frame, frame.f_back)):
                file = each.f_code.co_filename.rpartition("/jurybox/")[2]
                self.calls[file] += file.partition("/")[0] in PACKAGES

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
        """Those in which something ran every time."""
        return {file for file, calls in self.calls.items() if calls >= TIMES}


class Profiled(Affine):
    """Counts what the engine runs between two rows, in its loop and in threads that are started after it was loaded."""

    def __init__(self, told):
        super().__init__(2.0, 1.0)
        self.told, self.profile = Path(told), Profile()
        threading.setprofile(self.profile)

    def forward(self, observation):
        order = float(observation[0, 0])
        if order == BEGIN:
            self.profile.calls.clear()
            sys.setprofile(self.profile)
            self.profile.on = True
        elif order == END:
            self.profile.on = False
            self.told.write_text("\n".join(self.profile.files()))
        return super().forward(observation)


def profiled(told):
    return ServedModel(Profiled(told), VECTOR, {"action": TensorSpec("float32", (4,))})


def section(heading):
    return PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def walked(heading):
    """The Python files in the table of a section."""
    rows = [line for line in section(heading).splitlines() if line.startswith("|")]
    return {file for row in rows for file in re.findall(r"`([\w/]+\.py)`", row)}


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    """The files that ran for a request, and for a publication, in client and engine."""
    folder = tmp_path_factory.mktemp("walks")
    told = folder / "files"
    made = {"factory": "tests.integration.test_walks:profiled", "args": {"told": str(told)}}
    rows = np.ones((2, 4), np.float32)
    weights = {"scale": torch.tensor(3.0), "offset": torch.tensor(0.0)}

    @contextmanager
    def engine(model):
        """Gives a set that has what ran in the engine meanwhile at the end."""
        files = set()
        model.infer(np.full((1, 4), BEGIN, np.float32))
        yield files
        model.infer(np.full((1, 4), END, np.float32))
        files |= set(told.read_text().split()) - WATCHES

    models = {"juror": made, "policy": {**made, "publish": "double_buffer"}}
    with serving(folder, models) as running, running.connect() as server:
        juror, policy, publisher = server.model("juror"), server.model("policy"), server.publisher("policy")
        asking, publishing = Profile(), Profile()
        with engine(juror) as answering, asking.running():
            for _ in range(TIMES):
                juror.infer(rows)
        with engine(policy) as adopting:
            for _ in range(TIMES):
                with publishing.running():
                    version = publisher.publish(weights)
                while policy.infer_reply(rows, timeout=60).version < version:
                    pass
    return asking.files() | answering, publishing.files() | adopting


def test_one_request_runs_in_the_files_that_its_walk_names_and_in_at_most_twelve(walks):
    request, _ = walks
    assert request == walked("The path of one request")
    assert len(request) <= 12


def test_one_publication_runs_in_the_files_that_its_walk_names_and_in_at_most_nine(walks):
    request, publication = walks
    named = walked("The path of one publication")
    assert named <= publication
    assert publication - named <= request, "what a request needs anyway"
    assert len(named) <= 9


def test_the_map_names_every_module_or_its_folder():
    root, told = PAGE.parents[1], section("Modules")
    files = [
        path for part in ("protos", "client", "server", "training") for path in (root / part / "jurybox").rglob("*.py")
    ]
    files += [path for path in (root / "native").rglob("*.hpp") if path.parent.name != "tests"]
    missing = []
    for path in files:
        if path.stem.startswith(("__", "bind_")) or "_pb2" in path.stem or "__pycache__" in path.parts:
            continue
        packages = path.relative_to(root).parts[3:-1] if path.suffix == ".py" else ()
        if not re.search(rf"\b{path.stem}\b", told) and not any(re.search(rf"\b{name}/", told) for name in packages):
            missing.append(str(path.relative_to(root)))
    assert missing == []
