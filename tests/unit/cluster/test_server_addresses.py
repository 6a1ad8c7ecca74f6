"""An env worker's address of the server, by where the worker is."""

from __future__ import annotations

import os
import sys
import types

import pytest

from jurybox.training.trainings.launchers import LauncherMissing, launcher_named, wants_ray

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # read when Ray is imported, which other tests use too
pytest.importorskip("ray", reason="Ray is not installed: it is in the extra `ray`")

from jurybox.cluster.connection import NoAddress, ServerAddresses, credentials, network_address


def test_the_server_s_machine_uses_ipc_and_others_the_network() -> None:
    addresses = ServerAddresses("ipc:///run/engine", "grpcs://10.0.0.1:8001", "node-a", "10.0.0.1")
    assert addresses.from_node("node-a", "10.0.0.1") == "ipc:///run/engine"
    assert addresses.from_node("node-b", "10.0.0.2") == "grpcs://10.0.0.1:8001"
    assert ServerAddresses("tcp://scorer:9000").from_node("anywhere", "10.0.0.2") == "tcp://scorer:9000"


@pytest.mark.parametrize(("far", "why"), [("", "has no gRPC"), ("grpc://127.0.0.1:8001", "the loopback of 10.0.0.1")])
def test_a_server_that_others_cannot_reach_is_reported(far, why) -> None:
    with pytest.raises(NoAddress, match=f"10.0.0.2 cannot reach .*{why}.*--network-address"):
        ServerAddresses("ipc:///run/engine", far, "node-a", "10.0.0.1").from_node("node-b", "10.0.0.2")
    same_computer = ServerAddresses("ipc:///run/engine", "grpc://127.0.0.1:8001", "node-a", "127.0.0.1")
    assert same_computer.from_node("node-b", "127.0.0.1") == "grpc://127.0.0.1:8001"


@pytest.mark.parametrize(
    ("listens", "far"),
    [
        ("", ""),
        ("127.0.0.1:8001", "grpc://127.0.0.1:8001"),
        ("0.0.0.0:8001", "grpcs://10.0.0.1:8001"),
        ("[::]:8001", "grpcs://10.0.0.1:8001"),
        ("10.0.0.9:8001", "grpcs://10.0.0.9:8001"),
    ],
)
def test_other_names_of_a_server(listens, far) -> None:
    assert network_address(listens, "10.0.0.1") == far


def test_workers_get_the_credentials_and_nothing_else() -> None:
    assert credentials({"JURYBOX_TOKEN": "secret", "HOME": "/root"}) == {"JURYBOX_TOKEN": "secret"}


def test_a_ray_that_would_listen_everywhere_is_refused(monkeypatch) -> None:
    imported = types.ModuleType("ray._private.ray_constants")
    imported.ENABLE_RAY_CLUSTER = True  # as if Ray was imported first
    monkeypatch.setitem(sys.modules, "ray._private.ray_constants", imported)
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    with pytest.raises(LauncherMissing, match=r"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0.*before the first 'import ray'"):
        wants_ray("ray", None)
    wants_ray("ray", "10.0.0.1:6379")  # a cluster's addresses are its own
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
    wants_ray("ray", None)  # asked for


def test_an_address_without_ray_is_a_mistake() -> None:
    with pytest.raises(LauncherMissing, match="goes with --launcher ray"), launcher_named("local", "auto"):
        pass
    with pytest.raises(LauncherMissing, match="expected local or ray"), launcher_named("slurm"):
        pass
