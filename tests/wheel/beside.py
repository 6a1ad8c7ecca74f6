"""Use another library and the client in one process; run by the Python of an environment that has both.

beside.py NAME ADDRESSES...: uses the library, asks the server at every address, and uses the library again.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def ask(addresses: list[str]) -> None:
    from jurybox.client import connect

    for address in addresses:
        with connect(address, timeout=60.0) as server:
            assert np.array_equal(server.model("affine").infer(ROWS), 2 * ROWS + 1)


def protobuf(addresses: list[str]) -> None:
    from google.protobuf import struct_pb2

    assert struct_pb2.Struct.FromString(struct_pb2.Struct(fields={}).SerializeToString()) is not None


def tritonclient(addresses: list[str]) -> None:
    """Its messages have the names of ours: both must live in one process, and over both protocols."""
    import tritonclient.grpc as over_grpc
    import tritonclient.http as over_http

    for kind, scheme in ((over_grpc, "grpc://"), (over_http, "http://")):
        (place,) = (address.removeprefix(scheme) for address in addresses if address.startswith(scheme))
        with kind.InferenceServerClient(place) as client:
            told = client.get_model_metadata("affine", **({"as_json": True} if kind is over_grpc else {}))
            given = kind.InferInput(told["inputs"][0]["name"], ROWS.shape, "FP32")
            given.set_data_from_numpy(ROWS)
            answer = client.infer("affine", [given]).as_numpy(told["outputs"][0]["name"])
            assert np.array_equal(answer, 2 * ROWS + 1)


def tensorboard(addresses: list[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary import Writer

    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(folder)
        writer.add_scalar("reward", 0.5, 1)
        writer.close()
        events = EventAccumulator(folder)
        events.Reload()
        assert "reward" in str(events.Tags())


def wandb(addresses: list[str]) -> None:
    import wandb

    with tempfile.TemporaryDirectory() as folder, wandb.init(project="beside", mode="offline", dir=folder) as run:
        run.log({"reward": 0.5})


def mlflow(addresses: list[str]) -> None:
    import mlflow
    from mlflow.protos import service_pb2

    assert service_pb2.CreateRun(user_id="me").user_id == "me"
    with tempfile.TemporaryDirectory() as folder:
        mlflow.set_tracking_uri(f"sqlite:///{folder}/runs.db")
        mlflow.create_experiment("beside", f"file://{folder}")
        mlflow.set_experiment("beside")
        with mlflow.start_run():
            mlflow.log_metric("reward", 0.5)


def ray(addresses: list[str]) -> None:
    """A task asks, in a process that ray has made."""
    import ray

    for tries_left in (2, 1, 0):
        try:
            ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 << 20, runtime_env={})
            break
        except Exception as error:  # Ray gives its own processes half a minute to start, which a busy machine may need
            if not tries_left or "timed out during startup" not in str(error):
                raise
            ray.shutdown()
    try:
        ours = [address for address in addresses if not address.startswith("http")]
        ray.get(ray.remote(_ask_in_a_task).remote(ours, str(Path(__file__).parent)), timeout=120)
    finally:
        ray.shutdown()


def _ask_in_a_task(addresses: list[str], folder: str) -> None:
    sys.path.insert(0, folder)
    import beside

    beside.ask(addresses)


def sorrel(addresses: list[str]) -> None:
    """Without torch sorrel itself cannot be imported; what it brings along can."""
    import hydra
    import jax

    tensorboard(addresses)
    assert float(jax.numpy.ones(3).sum()) == 3.0 and hydra.__version__


if __name__ == "__main__":
    name, given = sys.argv[1], sys.argv[2:]
    use = globals()[name]
    use(given)
    ask([address for address in given if not address.startswith("http")])
    use(given)
    sys.stdout.write(f"{name} and the client work together\n")
