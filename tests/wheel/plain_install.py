"""What a plain `pip install jurybox` must be able to do; run by the Python that has it.

cibuildwheel runs it after every wheel; test_wheel.py gives it the address of a server, too.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile

import numpy as np


def check_contents() -> None:
    """No dependency of the server is installed; the client, the protocol and the native core are."""
    from jurybox import native

    for name in (
        "client",
        "client.transports.shm",
        "client.transports.zmq",
        "protocol.control_pb2",
        "protocol.weights",
    ):
        importlib.import_module(f"jurybox.{name}")
    assert native.__file__.endswith(".so")
    assert importlib.util.find_spec("torch") is None, "torch is here: this is no plain install"
    assert {"LICENSE", "NOTICE"} <= {
        file.name for file in importlib.metadata.files("jurybox") or () if "licenses" in file.parts
    }


def check_commands() -> None:
    """The command line names what is missing instead of a traceback."""
    done = subprocess.run([sys.executable, "-m", "jurybox.server.cli"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "[server]" in done.stderr, done.stderr


def check_no_server() -> None:
    """Without a server, the client raises an error in time."""
    from jurybox.client import ServerGone, connect

    with tempfile.TemporaryDirectory() as folder:
        try:
            connect(f"ipc://{folder}/engine", timeout=0.2)
        except ServerGone:
            return
    raise AssertionError("a server answered where none is")


def check_server(address: str) -> None:
    """Over both transports of the host, every answer is right."""
    from jurybox.client import connect

    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    for transport in ("shm", "zmq"):
        with connect(address, transport=transport) as server:
            assert np.array_equal(server.model("affine").infer(rows), 2 * rows + 1)


if __name__ == "__main__":
    check_contents()
    check_commands()
    check_no_server()
    for given in sys.argv[1:]:
        check_server(given)
    assert "torch" not in sys.modules
    sys.stdout.write("a plain install works\n")
