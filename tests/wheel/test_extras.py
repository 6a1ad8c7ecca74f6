"""The extras that a development environment lacks: their own tests, with the wheel and the extra. `make matrix`.

Minutes, and PyPI. Each extra is installed into an environment of its own. Tests without the package index are skipped,
with the reason in pytest's summary.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import pytest
from tests.wheel.environments import ROOT, Environment, Wheels, pinned

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1800)]

HERE = "{}.{}".format(*sys.version_info[:2])
JURORS = "tests/unit/jurors"
REWARDS = "tests/integration/test_rewards.py::test_"
UPSTREAM = "tests/integration/gateway/test_upstream_clients.py::test_"
ROBOTS = "tests/integration/robots"


class Extra(NamedTuple):
    """An extra, the Python and packages that are in none, and its tests."""

    name: str
    tests: list[str]
    packages: tuple[str, ...] = ()
    version: str = HERE
    torch: str = ""  # what is installed of it; "": this environment's is lent


EXTRAS = {
    "ray": Extra("ray", ["tests/integration/cluster"]),
    "siglip": Extra("siglip", [f"{JURORS}/test_juror_siglip.py"]),
    # open_clip needs torchvision, and the index's cannot be imported beside a CPU build of torch.
    "jurors": Extra(
        "jurors,training", [f"{JURORS}/test_ready_jurors.py", f"{JURORS}/test_juror_siglip.py"], torch=pinned("torch")
    ),
    "TorchRL": Extra("training", ["tests/integration/replay/test_torchrl.py"], ("torchrl", "tensordict")),
    "trainers": Extra(
        "training",
        [
            f"{REWARDS}trls_own_trainer_calls_the_hooks_and_skips_missing_scores",
            f"{REWARDS}verls_own_reward_manager_awaits_the_hook",
            f"{REWARDS}skyrls_environment_is_one_turn_with_the_jurors_reward",
            f"{UPSTREAM}verls_client_of_a_discriminative_reward_model",
        ],
        ("trl", "verl", "skyrl-gym", "aiohttp"),
    ),
    "judges": Extra(
        "training",
        [f"{UPSTREAM}openais_client_of_a_judge_and_of_embeddings", f"{UPSTREAM}coheres_client_of_a_reranker"],
        ("openai", "cohere"),
    ),
    "worlds": Extra(
        "training",
        ["tests/integration/marl/test_marl_worlds.py::test_environments_of_other_packages"],
        ("pygame", "mpe2"),
    ),
    "json-numpy": Extra(
        "training",
        [f"{ROBOTS}/test_act.py::test_json_numpy_itself_writes_and_reads_what_is_sent"],
        ("json-numpy",),
    ),
    "lerobot": Extra(
        "training",
        [f"{ROBOTS}/test_lerobot_door.py::test_lerobots_own_client_works_unchanged"],
        ("lerobot[async]==0.4.4",),
        torch="torch>=2.6",  # it limits that and torchvision
    ),
    "sorrel": Extra("sorrel", ["tests/integration/marl/test_sorrel.py"], version="3.12", torch=pinned("torch")),
}
SUITE = ["pytest", "pytest-timeout", "pytest-asyncio", "pytest-xdist", "hypothesis", "psutil"]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Wheels:
    return Wheels(tmp_path_factory.mktemp("wheels"))


@pytest.mark.parametrize("name", EXTRAS)
def test_the_tests_of_an_extra_pass_with_it(name, wheels, tmp_path) -> None:
    extra, tests, packages, version, torch = EXTRAS[name]
    wanted = [*packages, *SUITE]
    there = Environment.make(tmp_path / "env", version, wheels.of(version), *wanted, extra=extra, torch=torch)
    if not torch:
        there.lend_torch()
    options = ["-q", "-rs", "-p", "no:cacheprovider", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml"]
    said = there.run("-m", "pytest", *options, *(ROOT / test for test in tests), timeout=1500)
    sys.stdout.write(f"{name}: {said.splitlines()[-1]}\n")
    assert " passed" in said and "not installed" not in said and "could not import" not in said, said
