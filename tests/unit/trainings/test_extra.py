"""The command line without the extra `training` says in one sentence what to install."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from jurybox.protocol.revision import install_command
from jurybox.training.trainings.training import _EXTRA

WITHOUT = """
import sys
for name in ("gymnasium", "cv2"):
    sys.modules[name] = None  # as if it were not installed
from jurybox.training.cli import main
main(sys.argv[1:])
"""


MORE = ("train photo", "demo photo", "train marl", "train hockey", "train workflow")


@pytest.mark.parametrize(
    "command",
    ["train gym", *(pytest.param(each, marks=pytest.mark.runs) for each in MORE)],
)
def test_a_training_without_its_extra_ends_in_one_sentence_with_the_line_that_installs_it(command, tmp_path):
    arguments = [*command.split(), "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", WITHOUT, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "trainings need gymnasium, cv2, which are not installed" in done.stderr
    assert install_command("training") in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_checked_packages_are_those_of_the_extra():
    extra = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    wanted = {re.match(r"[\w-]+", line)[0].lower() for line in extra["training"]}
    wanted -= {"jurybox", "nvidia-ml-py"}  # the latter is asked for by torch, on a GPU
    found = packages_distributions()
    assert {found[name][0].lower().replace("_", "-") for name in _EXTRA} == wanted
