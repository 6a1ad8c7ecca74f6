"""The model-repository extension: loading and unloading models of the server's configuration.

A request cannot bring settings: they name code to import, and whoever reaches a port must not run code. A client on the
server's own door can (jurybox.client.Server.load).
"""

from __future__ import annotations

from jurybox.protocol.errors import Code, ModelNotFound, Refused
from jurybox.server.gateway.inference.lanes import Lanes
from jurybox.server.gateway.inference.request import Parameters

_LOAD = 120.0  # seconds


class Repository:
    """Loads and unloads through the gateway's connection."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    async def load(self, repository: str, model: str, parameters: Parameters) -> None:
        """Load a configured model, or load it again; it goes on serving meanwhile.

        Raises:
            ModelNotFound: none of that name is configured. ModelFailed, Timeout: it could not be loaded.
            Refused: settings or files came with the request.
        """
        _only_ours(repository)
        for name in parameters:
            raise Refused(
                f"parameter {name!r}: settings and files name code to run, which is not taken from HTTP or gRPC; "
                "change the server's configuration, or call jurybox.client's Server.load on the server's host"
            )
        await self._lanes.call(lambda server: server.load(model, timeout=_LOAD))

    async def unload(self, repository: str, model: str, parameters: Parameters) -> None:
        """Serve a model no longer. Raises ModelNotFound."""
        _only_ours(repository)
        for name in parameters:
            if name != "unload_dependents":  # no model depends on another here
                raise Refused(f"parameter {name!r} is not known here; there is: unload_dependents", Code.UNSUPPORTED)
        await self._lanes.call(lambda server: server.unload(model))


def _only_ours(repository: str) -> None:
    if repository:
        raise ModelNotFound(f"no repository {repository!r}: a server has one, without a name")
