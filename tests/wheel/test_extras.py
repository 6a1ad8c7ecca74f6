"""The extras that a development environment lacks: their own tests, with the wheel and the extra. `make matrix`.

Minutes, and PyPI. Each extra is installed into an environment of its own. Tests without the package index are skipped,
with the reason in pytest's summary.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import pytest
from tests.wheel.environments import ROOT, Environment, Wheels

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1800)]

HERE = "{}.{}".format(*sys.version_info[:2])
JURORS = "tests/unit/jurors"


class Extra(NamedTuple):
    """An extra, the Python and packages that are in none, and its tests."""

    name: str
    tests: list[str]
    packages: tuple[str, ...] = ()
    version: str = HERE
    own_torch: bool = False


EXTRAS = {
    "ray": Extra("ray", ["tests/integration/cluster"]),
    "siglip": Extra("siglip", [f"{JURORS}/test_juror_siglip.py"]),
    # open_clip needs torchvision, and the index's cannot be imported beside a CPU build of torch.
    "jurors": Extra(
        "jurors,training", [f"{JURORS}/test_ready_jurors.py", f"{JURORS}/test_juror_siglip.py"], own_torch=True
    ),
    "TorchRL": Extra("training", ["tests/integration/replay/test_torchrl.py"], ("torchrl", "tensordict")),
    "sorrel": Extra("sorrel", ["tests/integration/marl/test_sorrel.py"], version="3.12", own_torch=True),
}
SUITE = ["pytest", "pytest-timeout", "pytest-asyncio", "pytest-xdist", "hypothesis", "psutil"]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Wheels:
    return Wheels(tmp_path_factory.mktemp("wheels"))


@pytest.mark.parametrize("name", EXTRAS)
def test_the_tests_of_an_extra_pass_with_it(name, wheels, tmp_path) -> None:
    extra, tests, packages, version, own_torch = EXTRAS[name]
    wanted = [*packages, *SUITE]
    there = Environment.make(tmp_path / "env", version, wheels.of(version), *wanted, extra=extra, torch=own_torch)
    if not own_torch:
        there.lend_torch()
    options = ["-q", "-rs", "-p", "no:cacheprovider", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml"]
    said = there.run("-m", "pytest", *options, *(ROOT / test for test in tests), timeout=1500)
    sys.stdout.write(f"{name}: {said.splitlines()[-1]}\n")
    assert " passed" in said and "not installed" not in said and "could not import" not in said, said
