"""A LeRobot checkpoint from disk answers robots over websockets as it does in this process."""

from __future__ import annotations

import numpy as np
from tests.integration.robots.test_robot_server import robot
from tests.serving import serving
from tests.unit.server.test_lerobot_checkpoints import ROWS, answered, checkpoint, observations

from jurybox.server.robot_policies import lerobot


def test_a_lerobot_checkpoint_is_served_from_disk(tmp_path):
    folder = checkpoint(tmp_path / "policy", "known")
    model = {"factory": "jurybox.server.robot_policies:lerobot", "args": {"folder": str(folder)}, "max_batch": 4}
    more = '[robots.arm]\nmodel = "arm"\nlisten = "127.0.0.1:0"\n'
    wanted, rows = answered(lerobot(str(folder)), "known"), observations("known")
    with serving(tmp_path / "server", {"arm": model}, more=more) as running:
        with running.connect() as client:
            client.model("arm", rows=1, timeout=100).close()
            address = client.status()["server"]["robots"]["arm"]
        with robot(address) as ask:
            for row in range(ROWS):
                answer = ask({name: value[row] for name, value in rows.items()})
                np.testing.assert_allclose(answer["actions"], wanted[row], atol=1e-5)
