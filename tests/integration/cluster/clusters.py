"""Ray clusters of several nodes on this machine, each with its own shared memory, like separate machines."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

# Ray reads it on import: addresses of this machine are then loopback addresses, not ones that others reach.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
pytest.importorskip("ray", reason="Ray is not installed: it is in the extra `ray`")

import ray.cluster_utils

from jurybox.protocol.segment import directory

_STORE = 80 << 20
# A killed node is detected by its connections; this detects one that only stops answering.
_IMPATIENT = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_failure_threshold": 4}


class Nodes:
    """A head, on which the driver runs, and other nodes; each has a resource named like itself."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ.setdefault("RAY_worker_niceness", "0")  # otherwise Ray lowers the priority of its workers
        arguments = self._arguments("head") | {"_system_config": _IMPATIENT, "include_dashboard": False}
        self.cluster = ray.cluster_utils.Cluster(initialize_head=True, head_node_args=arguments)
        self.address = self.cluster.address

    def add(self, name: str):
        return self.cluster.add_node(**self._arguments(name))

    def kill(self, node) -> None:
        """Kill all of a node's processes at once, as when its machine loses power."""
        self.cluster.remove_node(node, allow_graceful=False)

    def segments(self, name: str) -> set[str]:
        """Return the names of the segments in a node's shared memory."""
        return set(os.listdir(self.folder(name)))

    def folder(self, name: str) -> Path:
        """Return the folder of a node's shared memory."""
        return self._folder / name

    def _arguments(self, name: str) -> dict[str, object]:
        (self._folder / name).mkdir(exist_ok=True)
        return {
            "num_cpus": 8,
            "resources": {name: 100},
            "object_store_memory": _STORE,
            "node_ip_address": "127.0.0.1",
            # Ray sets it for all of a node's processes, so nodes on one machine do not see each other's memory.
            "env_vars": {"JURYBOX_SHM_DIR": str(self._folder / name)},
        }


@contextmanager
def nodes(*names: str):
    """Run a cluster of a head and nodes with these names."""
    with tempfile.TemporaryDirectory(prefix="nodes-", dir=directory()) as folder:
        made = Nodes(folder)
        before = os.environ.get("JURYBOX_SHM_DIR")
        os.environ["JURYBOX_SHM_DIR"] = str(Path(folder) / "head")
        try:
            for name in names:
                made.add(name)
            yield made
        finally:
            os.environ["JURYBOX_SHM_DIR"] = before or ""
            if before is None:
                del os.environ["JURYBOX_SHM_DIR"]
            made.cluster.shutdown()


def placed(plan, **prefixes: str):
    """Return the plan with its roles placed: each keyword is a prefix of role names, its value their node."""
    roles = []
    for role in plan.roles:
        node = next((node for start, node in prefixes.items() if role.name.startswith(start)), None)
        roles.append(replace(role, cpus=0.1, resources={node: 1} if node else {}))
    return replace(plan, roles=tuple(roles))
