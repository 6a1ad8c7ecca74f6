"""The networks that a server loads of the trainings: they need only torch, with the names that learners publish."""

import sys

import numpy as np
import torch
from tests.forking import in_a_child

from jurybox.server.inproc import InprocServer
from jurybox.training.algorithms import served_networks
from jurybox.training.algorithms.registry import make
from jurybox.training.algorithms.served import raw_network
from jurybox.training.spaces import ALONE, ActionSpec, AgentSpec, Leaf

_IMPORT = """
import sys
class Server:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Server())
import jurybox.training.algorithms.served_networks
"""


def test_a_server_without_the_trainings_packages_can_load_them():
    from jurybox.training.trainings.training import _EXTRA

    def loaded():
        for name in list(sys.modules):
            if name.partition(".")[0] in _EXTRA or name.startswith("jurybox.training"):
                del sys.modules[name]
        exec(_IMPORT.format(missing=_EXTRA), {})
        return "jurybox.training.algorithms.served_networks" in sys.modules

    assert in_a_child(loaded), "in a fork, which need not import torch anew"


def test_every_network_loads_its_learners_weights_and_gives_the_same_outputs():
    seen = np.random.default_rng(0).integers(0, 255, (3, 2, 5), np.uint8)
    spec = AgentSpec((Leaf(ALONE, (2, 5), "uint8", scale=1 / 255),), ActionSpec(True, 4)).as_dict()
    for algorithm in ("dqn", "iqn", "ppo"):
        made = {"algorithm": algorithm, "settings": {"hidden": (8, 8)}, "spec": spec}
        network = raw_network(make(**made), 3)
        served = served_networks.gym_policy(**made)
        served.module.load_state_dict(network.state_dict())
        rows = torch.from_numpy(seen)
        with torch.no_grad():
            expected = network.actor(rows.flatten(1).float() / 255) if algorithm == "ppo" else network(rows)
        with InprocServer({"policy": served}) as server:
            answer = server.model("policy").infer(seen)
            found = answer["logits"] if algorithm == "ppo" else answer
            np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-6)
