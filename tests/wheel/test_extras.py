"""The extras that a development environment lacks: their own tests, with the wheel and the extra. `make extras`.

Minutes, and PyPI. Each extra is installed into an environment of its own. Tests without the package index are skipped,
with the reason in pytest's summary.
"""

from __future__ import annotations

import sys

import pytest
from tests.wheel.environments import ROOT, Environment, Wheels, run, uv

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1800)]

HERE = "{}.{}".format(*sys.version_info[:2])
# The Python, the extra, packages that are in none, and its tests.
EXTRAS: dict[str, tuple[str, str, list[str], list[str]]] = {
    "ray": (HERE, "ray", [], ["tests/integration/cluster"]),
    # Not the extra jurors: open_clip's torchvision of PyPI cannot be imported beside a CPU build of torch.
    "siglip": (
        HERE,
        "siglip",
        [],
        ["tests/unit/jurors/test_ready_jurors.py", "tests/unit/jurors/test_juror_siglip.py"],
    ),
    "TorchRL": (HERE, "training", ["torchrl", "tensordict"], ["tests/integration/replay/test_torchrl.py"]),
    "sorrel": ("3.12", "sorrel", [], ["tests/integration/marl/test_sorrel.py"]),
}
SUITE = ["pytest", "pytest-timeout", "pytest-asyncio", "pytest-xdist", "hypothesis", "psutil"]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Wheels:
    return Wheels(tmp_path_factory.mktemp("wheels"))


@pytest.mark.parametrize("name", EXTRAS)
def test_the_tests_of_an_extra_pass_with_it(name, wheels, tmp_path) -> None:
    version, extra, packages, tests = EXTRAS[name]
    there = Environment.make(tmp_path / "env", version, wheels.of(version), *packages, *SUITE, extra=extra)
    if version == HERE:
        there.lend_torch()
    else:
        pinned = next(
            line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
        )
        run(uv(), "pip", "install", "--quiet", "--python", there.python, pinned, timeout=1200)
    options = ["-q", "-rs", "-p", "no:cacheprovider", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml"]
    said = there.run("-m", "pytest", *options, *(ROOT / test for test in tests), timeout=1500)
    sys.stdout.write(f"{name}: {said.splitlines()[-1]}\n")
    assert " passed" in said and "not installed" not in said, said
