"""The gateway's door of the Open Inference Protocol: what its transports, HTTP and gRPC, share."""

from __future__ import annotations

from typing import Any

from jurybox.protocol.errors import Error, ModelNotFound
from jurybox.server.gateway.inference import models
from jurybox.server.gateway.inference.infer import Inference
from jurybox.server.gateway.inference.lanes import Lanes
from jurybox.server.gateway.inference.parameters import weights_version
from jurybox.server.gateway.inference.repository import Repository
from jurybox.server.gateway.inference.shared_memory import Regions
from jurybox.server.gateway.self_test import SelfTest
from jurybox.server.gateway.source import StatusSource


class OpenInference:
    """One server, as the protocol sees it.

    Args:
        address: the server's.
        shared_memory: what the names of clients' shared memory begin with; empty: they may name none.
    """

    def __init__(self, address: str, source: StatusSource, *, shared_memory: str) -> None:
        self._source = source
        self._lanes = Lanes(address)
        self.self_test = SelfTest(source, self._lanes)
        self.regions = Regions(shared_memory)
        self.inference = Inference(self._lanes, self.regions, self.self_test.told)
        self.repository = Repository(self._lanes)

    def metadata(self) -> dict[str, Any]:
        """Name, build, and which extensions of the protocol are served."""
        return models.server_metadata(shared_memory=self.regions.allowed)

    async def live(self) -> bool:
        """Whether the supervisor answers."""
        try:
            await self._source.status()
        except Error:
            return False
        return True

    async def reasons(self) -> list[str]:
        """Why the server is not ready; empty when it is."""
        return await self.self_test.reasons()

    async def model_reason(self, name: str, version: str) -> str:
        """Why a model is not ready; empty when it is. Raises ModelNotFound."""
        document = await self._source.status(fresh=True)
        model = models.find(document, name)
        if document["server"]["state"] == "draining" or model["state"] not in ("ready", "loading"):
            return f"the server is {document['server']['state']}, model {name!r} is {model['state']}"
        if wanted := weights_version(version):
            return await self.self_test.ask(name, wanted)
        if version and model["weights"]["version"]:  # "0": the weights it was loaded with
            return f"version 0 of {name!r} is not held, {model['weights']['version']} is the newest"
        return await self.self_test.silent(name)

    async def described(self, name: str, version: str) -> dict[str, Any]:
        """A model's part of the status document, once it has loaded. Raises as `models.described`."""
        return models.described(await self._source.status(fresh=True), name, version)

    async def statistics(self, name: str, version: str) -> list[dict[str, Any]]:
        """Of one model, or of all without a name. Raises ModelNotFound."""
        document = await self._source.status(fresh=True)
        found = [models.described(document, name, version)] if name else document["models"]
        return [models.statistics(model) for model in found]

    async def index(self, repository: str, *, ready: bool) -> list[dict[str, Any]]:
        """The models there are. Raises ModelNotFound for a repository by name: there is one, without."""
        if repository:
            raise ModelNotFound(f"no repository {repository!r}: a server has one, without a name")
        return models.index(await self._source.status(fresh=True), ready=ready)

    def doubt(self) -> None:
        """Something went wrong in the event loop that nobody awaited: it may have been the coming in of an answer."""
        self._lanes.doubt()

    def close(self) -> None:
        """Give lanes and regions back."""
        self._lanes.close()
        self.regions.close()
