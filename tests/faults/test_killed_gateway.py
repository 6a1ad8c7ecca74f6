"""kill -9 of the gateway: local clients are not affected, and it is restarted."""

from __future__ import annotations

import os
import signal
import threading
import time

import httpx
import numpy as np
from tests.serving import serving, wait_until

from jurybox.client import Error

BACK = 40.0  # seconds, on a machine that does other things too; docs/watching.md has what it takes on an idle one


def test_a_killed_gateway_is_restarted_on_its_port_and_clients_are_not_affected(tmp_path, nothing_left):
    with serving(tmp_path, {"affine": {"factory": "tests.models:affine"}}, http="127.0.0.1:0") as server:
        stop, errors, answered = threading.Event(), [], [0]

        def ask() -> None:
            with server.connect() as client:
                model = client.model("affine", rows=2)
                while not stop.is_set():
                    try:
                        model.infer(np.ones((2, 4), np.float32), timeout=10.0)
                    except Error as error:
                        errors.append(error)
                        return
                    answered[0] += 1

        with server.connect() as client:
            http = f"http://{client.status()['server']['http']}"
        assert httpx.get(f"{http}/metrics", timeout=10).status_code == 200
        thread = threading.Thread(target=ask)
        thread.start()
        try:
            wait_until(lambda: answered[0] > 20, 30, "service")
            before = answered[0]
            killed = time.monotonic()
            os.kill(server.pids()["gateway"], signal.SIGKILL)
            wait_until(lambda: ready(http), BACK, "the gateway")
            print(f"back after {time.monotonic() - killed:.2f} s")
            wait_until(lambda: errors or answered[0] > before + 20, 30, "service")
        finally:
            stop.set()
            thread.join(30)
        assert not errors
        assert "child died" in server.text()


def ready(http: str) -> bool:
    try:
        return httpx.get(f"{http}/health/ready", timeout=2).status_code == 200
    except httpx.TransportError:
        return False
