"""The wheel in other environments: beside other packages, in other Pythons. `make matrix`; minutes, and PyPI.

Tests without their interpreter or the package index are skipped, with the reason in pytest's summary.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from tests.integration.conftest import MODELS
from tests.serving import serving
from tests.wheel.environments import ROOT, Environment, Wheels, run, uv

from jurybox.protocol.segment import directory

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

HERE = "{}.{}".format(*sys.version_info[:2])
# What is installed beside the wheel, in one resolution, and the Python it is for.
NEIGHBOURS = {
    "protobuf 4.25": ("protobuf", ["protobuf==4.25.*"], "3.11"),
    "protobuf 5.29": ("protobuf", ["protobuf==5.29.*"], "3.11"),
    "protobuf 6.33": ("protobuf", ["protobuf==6.33.*"], "3.12"),
    "protobuf 7": ("protobuf", ["protobuf==7.*"], "3.12"),
    "tritonclient": ("tritonclient", ["tritonclient[grpc,http]"], "3.12"),
    "older tritonclient": ("tritonclient", ["tritonclient[grpc,http]==2.45.*", "numpy<2"], "3.11"),
    "tensorboard": ("tensorboard", ["tensorboard"], "3.12"),
    "wandb": ("wandb", ["wandb"], "3.12"),
    "mlflow": ("mlflow", ["mlflow"], "3.12"),
    "ray": ("ray", ["ray"], "3.12"),
}
SUITE = ["pytest", "pytest-timeout", "pytest-asyncio", "hypothesis"]
# A Python, how versions are chosen, and what of the versions is to be seen.
PYTHONS = {
    "3.10, the oldest of everything": (
        "3.10",
        ["--resolution", "lowest-direct"],
        {"numpy": "1.26.0", "pyzmq": "22.3.0", "protobuf": "4.25.0", "grpcio": "1.48.2"},
    ),
    "3.11, NumPy 1.26": ("3.11", [], {"numpy": "1.26."}),
    "3.12, NumPy 1.26": ("3.12", [], {"numpy": "1.26."}),
    "3.12": ("3.12", [], {"numpy": "2."}),
    "3.13": ("3.13", [], {"numpy": "2."}),
    "3.14": ("3.14", [], {"numpy": "2."}),
    "3.13t": ("3.13t", [], {"numpy": "2."}),
    "3.14t": ("3.14t", [], {"numpy": "2."}),
}
# There are wheels of gRPC for no free-threaded Python, and of others not of each version: pyzmq 27.3 has one for 3.14t,
# 27.1 for 3.13t.
FREE_THREADED = {"3.13t", "3.14t"}
WHEELS_ALONE = ("--only-binary", ":all:")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Wheels:
    return Wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server with every model of the client's suite, over every transport, of the Python that runs this."""
    transports = {"tcp": "127.0.0.1:0", "grpc": "127.0.0.1:0", "http": "127.0.0.1:0"}
    with serving(tmp_path_factory.mktemp("server"), MODELS, {"PYTHONPATH": str(ROOT)}, **transports) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    """Another, for the part of the suite over gRPC: a gateway keeps rows of every model."""
    folder = tmp_path_factory.mktemp("gateway")
    with serving(folder, MODELS, {"PYTHONPATH": str(ROOT)}, grpc="127.0.0.1:0") as running:
        yield running


@pytest.mark.parametrize("case", NEIGHBOURS)
def test_the_client_works_beside(case, wheels, server, tmp_path) -> None:
    name, packages, version = NEIGHBOURS[case]
    there = Environment.make(tmp_path / "env", version, wheels.of(version), *packages, extra="grpc")
    addresses = [
        server.address,
        *(f"{transport}://{server.listening(transport)}" for transport in ("tcp", "grpc", "http")),
    ]
    said = there.run(ROOT / "tests/wheel/beside.py", name, *addresses, WANDB_SILENT="true", JURYBOX_SHM_DIR=directory())
    assert f"{name} and the client work together" in said
    if case.startswith("protobuf"):
        assert there.version_of("protobuf").startswith(case.split()[1])


def test_sorrel_is_an_extra(wheels, server, tmp_path) -> None:
    """All requirements of the extra are compatible; torch, the largest, is resolved and not downloaded."""
    wheel = wheels.of("3.12")
    wanted = tmp_path / "wanted.in"
    wanted.write_text(f"jurybox[sorrel] @ {wheel.as_uri()}\n")
    resolved = run(uv(), "pip", "compile", "--quiet", "--no-header", "--python-version", "3.12", wanted)
    assert "\nsorrel==" in resolved and "\ntorch==" in resolved and "\nprotobuf==6." in resolved
    there = Environment.make(tmp_path / "env", "3.12", wheel, extra="sorrel")
    assert there.version_of("sorrel") >= "1.6"
    said = there.run(ROOT / "tests/wheel/beside.py", "sorrel", server.address, JURYBOX_SHM_DIR=directory())
    assert "sorrel and the client work together" in said


@pytest.mark.parametrize("case", PYTHONS)
def test_the_clients_suite_passes_in_another_python(case, wheels, server, gateway, tmp_path) -> None:
    version, options, seen = PYTHONS[case]
    pins = ["numpy==1.26.*"] if seen["numpy"].startswith("1.26") else []
    if options:  # lowest-direct applies to directly named requirements
        packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        pins = [*packages["dependencies"], *packages["optional-dependencies"]["grpc"]]
    extra = "" if version in FREE_THREADED else "grpc"
    options = [*options, *(WHEELS_ALONE if version in FREE_THREADED else ())]
    there = Environment.make(tmp_path / "env", version, wheels.of(version), *pins, extra=extra, options=tuple(options))
    for package, start in seen.items():
        assert there.version_of(package).startswith(start)
    run(uv(), "pip", "install", "--quiet", *WHEELS_ALONE, "--python", there.python, *SUITE)
    given = {"MATRIX_SERVER": server.address, "MATRIX_GATEWAY": gateway.address}
    suite = [
        "-p",
        "no:cacheprovider",
        "--rootdir",
        ROOT,
        "-c",
        ROOT / "pyproject.toml",
        ROOT / "tests/integration/test_client.py",
    ]
    said = there.run("-m", "pytest", "-q", *suite, JURYBOX_SHM_DIR=directory(), **given)
    sys.stdout.write(f"Python {version}: {said.splitlines()[-1]}\n")
    assert " passed" in said


@pytest.mark.parametrize("version", sorted(FREE_THREADED))
def test_a_free_threaded_python_stays_free_threaded(version, wheels, server, tmp_path) -> None:
    """The client's imports switch no lock on, and threads share rings, weights and models without one."""
    there = Environment.make(tmp_path / "env", version, wheels.of(version), options=WHEELS_ALONE)
    addresses = [server.address, f"tcp://{server.listening('tcp')}"]
    said = there.run(ROOT / "tests/wheel/without_the_lock.py", *addresses, JURYBOX_SHM_DIR=directory())
    assert said == "threads need no lock\n"


@pytest.mark.parametrize("protobuf", ["5.29", "6.33", "7"])
def test_a_server_serves_with_protobuf(protobuf, wheels, tmp_path) -> None:
    """Health, reflection and inference over gRPC: the packages of gRPC's that fit come with it."""
    there = Environment.make(tmp_path / "env", HERE, wheels.of(HERE), f"protobuf=={protobuf}.*", extra="server")
    there.lend_torch()
    assert there.version_of("protobuf").startswith(protobuf)
    models = {"affine": {"factory": "tests.models:affine"}}
    transports = {"tcp": "127.0.0.1:0", "grpc": "127.0.0.1:0"}
    env = {"PYTHONPATH": str(ROOT)}
    with serving(tmp_path / "server", models, env, python=str(there.python), **transports) as server:
        addresses = [server.address, *(f"{transport}://{server.listening(transport)}" for transport in transports)]
        said = run(sys.executable, ROOT / "tests/wheel/beside.py", "protobuf", *addresses)
        assert "protobuf and the client work together" in said
        answer = there.run(ROOT / "tests/wheel/ask_grpc.py", server.listening("grpc"))
    assert answer.split() == ["SERVING", "inference.GRPCInferenceService"]


def test_the_aarch64_wheel_answers_under_an_emulator(wheels, server, tmp_path) -> None:
    """Over the network and over shared memory, beside a server of this machine's own kind."""
    root, emulator = os.environ.get("MATRIX_AARCH64"), shutil.which("qemu-aarch64-static")
    if not root or not emulator:
        pytest.skip("MATRIX_AARCH64 names no folder with Debian's Python for arm64, or there is no qemu-user-static")
    (python,) = [path for path in Path(root).glob("usr/bin/python3.*") if re.fullmatch(r"python3\.\d+", path.name)]
    version = python.name.removeprefix("python")
    made = ["--python", version, "--machine", "aarch64", "--out", tmp_path / "dist"]
    run(sys.executable, ROOT / ".ci/wheels.py", *made)
    (wheel,) = (tmp_path / "dist").glob("*aarch64.whl")
    place = [
        "--python-platform",
        "aarch64-manylinux_2_34",
        "--python-version",
        version,
        "--target",
        tmp_path / "site",
    ]
    run(uv(), "pip", "install", "--quiet", "--only-binary", ":all:", *place, wheel)
    addresses = [server.address, f"tcp://{server.listening('tcp')}"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "JURYBOX_SHM_DIR": str(directory())}
    said = run(emulator, "-L", root, python, ROOT / "tests/wheel/beside.py", "protobuf", *addresses, env=env)
    assert "protobuf and the client work together" in said
