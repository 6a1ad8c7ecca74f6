"""Clients of each protocol of robots, which send one observation over and over: bytes that are made once."""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import msgpack
import numpy as np
import zmq
from websockets.sync.client import connect

from benchmarks.robots.policies import DIMENSION, HORIZON, NAMES, SIDE
from jurybox.server.gateway.robots.msgpack_arrays import packb, unpackb

DOORS = ("openpi", "act", "gr00t", "lerobot")
_MOTORS = [f"joint_{i}" for i in range(DIMENSION)]
Ask = Callable[[], None]


def observation() -> dict[str, Any]:
    dice = np.random.default_rng(0)
    images = {name: dice.integers(0, 256, (SIDE, SIDE, 3), np.uint8) for name in ("top", "wrist")}
    return {"images": images, "state": dice.normal(size=DIMENSION)}


@contextlib.contextmanager
def openpi(where: str) -> Iterator[Ask]:
    request = packb(observation())
    with connect(f"ws://{where}", compression=None, max_size=None, open_timeout=60) as connection:
        connection.recv(60)

        def ask() -> None:
            connection.send(request)
            assert unpackb(connection.recv(60))["actions"].shape == (HORIZON, DIMENSION)

        yield ask


@contextlib.contextmanager
def act(where: str) -> Iterator[Ask]:
    def numpied(array: Any) -> dict[str, Any]:
        data = base64.b64encode(array.tobytes()).decode()
        return {"__numpy__": data, "dtype": array.dtype.str, "shape": list(array.shape)}

    seen = observation()
    images = {name: numpied(image) for name, image in seen["images"].items()}
    body = json.dumps({"images": images, "state": numpied(seen["state"])}).encode()
    connection = http.client.HTTPConnection(where, timeout=60)

    def ask() -> None:
        connection.request("POST", "/act", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        assert len(json.loads(answer.read())) == HORIZON and answer.status == 200

    yield ask
    connection.close()


@contextlib.contextmanager
def gr00t(where: str) -> Iterator[Ask]:
    def npy(array: Any) -> dict[str, Any]:
        file = io.BytesIO()
        np.save(file, array)
        return {"__ndarray_class__": True, "as_npy": file.getvalue()}

    seen = observation()
    given = {
        "video": {name: npy(image[None, None]) for name, image in seen["images"].items()},
        "state": {"joints": npy(seen["state"][None, None].astype(np.float32))},
    }
    request = msgpack.packb({"endpoint": "get_action", "data": {"observation": given, "options": None}})
    with zmq.Context() as context, context.socket(zmq.REQ) as connection:
        connection.connect(f"tcp://{where}")
        connection.rcvtimeo = 60_000

        def ask() -> None:
            connection.send(request)
            actions, _ = msgpack.unpackb(connection.recv())
            assert len(actions["actions"]["as_npy"]) > 4 * HORIZON * DIMENSION

        yield ask


@contextlib.contextmanager
def lerobot(where: str) -> Iterator[Ask]:
    def pickled(kind: str, fields: dict[str, Any]) -> bytes:
        """An object of one of LeRobot's classes, which are not needed for it."""
        made = f"clerobot.async_inference.helpers\n{kind}\n".encode() + b")\x81"
        return b"\x80\x03" + made + pickle.dumps(fields, 3)[2:-1] + b"b."

    def field(number: int, data: bytes) -> bytes:
        size, encoded = len(data), b""
        while size > 127:
            encoded += bytes((size & 127 | 128,))
            size >>= 7
        return bytes((number << 3 | 2,)) + encoded + bytes((size,)) + data

    seen = observation()
    features = {"observation.state": {"dtype": "float32", "shape": (DIMENSION,), "names": _MOTORS}}
    features |= {f"observation.images.{name}": {"dtype": "image", "shape": (SIDE, SIDE, 3)} for name in seen["images"]}
    setup = pickled("RemotePolicyConfig", {"lerobot_features": features, "actions_per_chunk": HORIZON})
    values = {**seen["images"], **dict(zip(_MOTORS, seen["state"].tolist(), strict=True))}
    body = pickled("TimedObservation", {"timestamp": 0.0, "timestep": 0, "observation": values, "must_go": True})
    message = b"\x08\x03" + field(2, body)
    with grpc.insecure_channel(where, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        at = "/transport.AsyncInference/"
        channel.unary_unary(at + "Ready")(b"", timeout=60)
        channel.unary_unary(at + "SendPolicyInstructions")(field(1, setup), timeout=60)
        observe, actions = channel.stream_unary(at + "SendObservations"), channel.unary_unary(at + "GetActions")

        def ask() -> None:
            observe(iter((message,)), timeout=60)
            assert len(actions(b"", timeout=60)) > HORIZON * DIMENSION

        yield ask


CLIENTS: dict[str, Callable[[str], contextlib.AbstractContextManager[Ask]]] = {
    "openpi": openpi,
    "act": act,
    "gr00t": gr00t,
    "lerobot": lerobot,
}
assert set(CLIENTS) == set(DOORS) == set(NAMES)
