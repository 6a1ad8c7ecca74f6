"""Metadata, configuration and statistics of models, and the repository's index.

All data comes from the server's status document. The results are dicts with the protocol's field names, which JSON and
protobuf messages share.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from jurybox.protocol.errors import SLEEPS, Code, Error, ModelNotFound, Refused, plain
from jurybox.protocol.spec import BYTES, OIP_NAMES
from jurybox.protocol.wire import BEREFT, require_name
from jurybox.server.frontend.frontend import Frontend
from jurybox.server.frontend.panels import TOTAL
from jurybox.server.gateway.inference.parameters import truth, weights_version
from jurybox.server.gateway.inference.tensors import Parameters, malformed, read_json

Document = dict[str, Any]

NAME = "jurybox"
EXTENSIONS = (
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "parameters",
    "sequence",
    "statistics",
    "binary_tensor_data",
)
_STATES = {"ready": "READY", "loading": "LOADING", "failed": "UNAVAILABLE", "quarantined": "UNAVAILABLE"}
_STATES["sleeping"] = "UNAVAILABLE"  # the reason begins with SLEEPS


def find(document: Document, name: str) -> dict[str, Any]:
    """Return a model's part of the status document. Raises ModelNotFound, which lists the served models."""
    require_name(name)
    if name in (panels := document.get("panels", {})):
        return _panel(document, name, panels[name])
    for model in document["models"]:
        if model["name"] == name:
            return dict(model)
    there = ", ".join(sorted([*(model["name"] for model in document["models"]), *panels])) or "none"
    raise ModelNotFound(f"no model {name!r} is served here; there are: {there}")


def _panel(document: Document, name: str, members: dict[str, Any]) -> dict[str, Any]:
    """Return a panel as a model's part: the inputs of all members; as outputs the total and each member's score."""
    parts = [find(document, member["model"]) for member in members.values()]
    bad = [part for part in parts if part["state"] != "ready"]
    inputs = {key: spec for part in parts for key, spec in part["inputs"].items()}
    score = {"dtype": "float32", "shape": []}
    oldest = min(parts, key=lambda part: int(part["weights"]["version"]))
    return {
        **oldest,
        "name": name,
        "state": bad[0]["state"] if bad else "ready",
        "reason": f"member {bad[0]['name']!r}: {bad[0]['reason']}" if bad else "",
        "inputs": {} if any(not part["inputs"] for part in parts) else inputs,
        "outputs": {output: dict(score) for output in (TOTAL, *members)},
        "max_batch": min(part["max_batch"] for part in parts),
        "session_state": {},
        "parameters": {},
    }


def described(document: Document, name: str, version: str) -> dict[str, Any]:
    """Return a model's part of the status document, as `find` does, if it is loaded and the version exists.

    Raises:
        ModelNotFound: no such model or version. Refused (code NOT_READY): it is loading, or loading failed.
    """
    model = find(document, name)
    if weights_version(version) > model["weights"]["newest"]:
        raise ModelNotFound(
            f"version {version} of model {name!r} was never published: the newest is {model['weights']['newest']}"
        )
    if not model["inputs"]:  # a sleeping model has them
        why = f": {model['reason']}" if model["reason"] else ""
        raise Refused(f"model {name!r} is {model['state']}{why}", Code.NOT_READY)
    return model


def metadata(model: dict[str, Any]) -> dict[str, Any]:
    """Return the model's metadata; -1 in a shape stands for any number of rows."""

    def tensors(specs: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"name": name, "datatype": OIP_NAMES[spec["dtype"]], "shape": [-1, *spec["shape"]]}
            for name, spec in specs.items()
        ]

    return {
        "name": model["name"],
        "versions": [str(model["weights"]["version"])],
        "platform": NAME,
        "inputs": tensors(model["inputs"]),
        "outputs": tensors(model["outputs"]),
    }


def config(model: dict[str, Any], idle: float) -> dict[str, Any]:
    """Return the model's configuration in Triton's fields; `dims` is the shape of one row.

    The full specs are in `parameters.jurybox` as JSON: inputs, outputs and state in the format of spec.plain_specs, and
    for each parameter its input and its default.

    Args:
        idle: seconds without a request after which a sequence ends.
    """
    state = model["session_state"]

    def tensors(specs: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"name": name, "data_type": _data_type(spec["dtype"]), "dims": list(spec["shape"])}
            for name, spec in specs.items()
        ]

    def plain_specs(specs: dict[str, Any]) -> list[list[Any]]:
        return [
            [name, spec["dtype"], spec["shape"], spec.get("capacity", 0), spec.get("finite", False)]
            for name, spec in specs.items()
        ]

    contract = {"inputs": model["inputs"], "outputs": model["outputs"], "state": state}
    free = {name: [one["input"], one["default"]] for name, one in model.get("parameters", {}).items()}
    extra = {"parameters": free} if free else {}
    scheduling: dict[str, Any] = {"dynamic_batching": {}}
    if state:
        scheduling = {"sequence_batching": {"max_sequence_idle_microseconds": int(idle * 1e6)}}
    return {
        "name": model["name"],
        "platform": NAME,
        "backend": NAME,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": model["max_batch"],
        "input": tensors(model["inputs"]),
        "output": tensors(model["outputs"]),
        "parameters": {
            NAME: {"string_value": json.dumps({kind: plain_specs(specs) for kind, specs in contract.items()} | extra)}
        },
        **scheduling,
    }


def _data_type(dtype: str) -> str:
    if dtype.startswith("float8"):
        return "TYPE_INVALID"  # Triton has none for it
    return "TYPE_STRING" if dtype == BYTES else f"TYPE_{OIP_NAMES[dtype]}"


def statistics(model: dict[str, Any]) -> dict[str, Any]:
    """Return a model's counters since the server's start, of all clients, not only of the gateway.

    Counts are exact, but the engines count tickets, not requests: one of the gateway's may carry many requests, and a
    request with more rows than a batch takes several. The scoreboard's histograms of times have buckets in powers of
    two, so a sum of nanoseconds is an estimate: it uses each bucket's middle on the logarithmic scale, which is off by
    at most a factor of 1.42.
    """
    batches, tickets = model["batches"], model["requests"]
    histograms = model["histograms"]
    queue, forward, whole = (_sum_ns(histograms[name]) for name in ("queue_ns", "forward_ns", "request_ns"))
    return {
        "name": model["name"],
        "version": str(model["weights"]["version"]),
        "last_inference": 0,
        "inference_count": model["rows"],
        "execution_count": batches,
        "inference_stats": {
            "success": {"count": tickets, "ns": whole},
            "fail": {"count": model["failed"] + model["expired"] + model["refused"], "ns": 0},
            "queue": {"count": tickets, "ns": queue},
            "compute_input": {"count": tickets, "ns": 0},
            "compute_infer": {"count": batches, "ns": forward},
            "compute_output": {"count": tickets, "ns": 0},
            "cache_hit": {"count": model["cache_hits"], "ns": 0},
            "cache_miss": {"count": model["cache_misses"], "ns": 0},
        },
    }


def index(document: Document, *, ready: bool) -> list[dict[str, Any]]:
    """Return the models; only the ready ones if `ready`."""
    return [
        {
            "name": model["name"],
            "version": str(model["weights"]["version"]),
            "state": _STATES[model["state"]],
            "reason": plain(_reason(model)),
        }
        for model in document["models"]
        if not ready or model["state"] == "ready"
    ]


def _reason(model: dict[str, Any]) -> str:
    reason = str(model["reason"])
    return reason if model["state"] != "sleeping" else f"{SLEEPS}: {reason}" if reason else SLEEPS


def _sum_ns(counts: list[int]) -> int:
    return round(sum(count * 2 ** (bucket - 0.5) for bucket, count in enumerate(counts) if bucket))


# The model-repository extension: loading and unloading models.
#
# A request may contain settings, which name code to import: only what `server.remote_factories` allows, which is
# nothing by default.


_LOAD = 120.0  # seconds


class Repository:
    """Loads and unloads through the gateway's connection."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._shortening: set[asyncio.Future[None]] = set()

    async def load(self, repository: str, model: str, parameters: Parameters) -> None:
        """Load or reload a configured model; it keeps serving during a reload.

        Args:
            parameters: empty; or `wake`: true to wake a sleeping model; or `settings` (the JSON of [models.NAME]) and
                `keep` (seconds) to load a model that the client defines; or `keep` alone to keep such a model longer.

        Raises:
            ModelNotFound: no model of that name is configured. ModelFailed, Timeout: it could not be loaded.
            Refused: the request has other parameters, or settings that the configuration does not allow.
        """
        only_ours(repository)
        given = dict(parameters)
        if truth("wake", given.pop("wake", False)):
            if given:
                raise malformed("wake restores a model as it was: expected no other parameter with it")
            await self.wake(model)
            return
        settings, keep = given.pop("settings", ""), given.pop("keep", 0)
        for name in given:
            raise Refused(
                f"parameter {name!r}: Triton's files and settings name code to run, which is not accepted over HTTP or "
                "gRPC; change the server's configuration, or call jurybox.client's Server.load"
            )
        if not isinstance(settings, str) or isinstance(keep, bool) or not isinstance(keep, int | float):
            raise malformed("expected settings, JSON in a string, and keep, seconds")
        if settings:
            overrides = read_json(settings.encode())
            await self._frontend.call(
                lambda server: server.load(model, overrides, keep=float(keep), timeout=_LOAD, remote=True)
            )
        elif keep:
            await self._frontend.call(lambda server: server.keep(model, float(keep)))
        else:
            await self._frontend.call(lambda server: server.load(model, timeout=_LOAD))

    def keep_no_longer(self, model: str) -> None:
        """Shorten the time for which a model is kept whose client's connection has ended."""

        async def shorten() -> None:
            with contextlib.suppress(Error):  # it is unloaded already, or the server is gone
                await self._frontend.call(lambda server: server.keep(model, BEREFT))

        self._shortening.add(task := asyncio.ensure_future(shorten()))
        task.add_done_callback(self._shortening.discard)

    async def unload(self, repository: str, model: str, parameters: Parameters) -> None:
        """Unload a model; if the parameter `sleep` is true, put it to sleep instead. Raises ModelNotFound."""
        only_ours(repository)
        given = dict(parameters)
        sleeps = truth("sleep", given.pop("sleep", False))
        for name in given:
            if name != "unload_dependents":  # no model depends on another here
                raise Refused(
                    f"parameter {name!r} is not known here; there are: unload_dependents, sleep", Code.UNSUPPORTED
                )
        if sleeps:
            await self.sleep(model)
            return
        await self._frontend.call(lambda server: server.unload(model))

    async def sleep(self, model: str) -> None:
        """Move a model's weights to host memory. Raises ModelNotFound, ModelFailed, Refused."""
        await self._frontend.call(lambda server: server.sleep(model, timeout=_LOAD))

    async def wake(self, model: str) -> None:
        """Move a sleeping model's weights back to the device. Raises ModelNotFound, ModelFailed."""
        await self._frontend.call(lambda server: server.wake(model, timeout=_LOAD))


def only_ours(repository: str) -> None:
    """Raise ModelNotFound if a request names a repository: the only one has no name."""
    if repository:
        raise ModelNotFound(f"no repository {repository!r}: a server has one, without a name")
