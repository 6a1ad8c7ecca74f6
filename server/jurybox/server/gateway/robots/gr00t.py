"""GR00T's policy server: ZeroMQ's REQ and REP, and msgpack whose arrays are .npy files.

A request is {"endpoint": TEXT, "data": map, "api_token": TEXT}; an error is answered {"error": why}.

    ping                 -> {"status": "ok", "message": TEXT}
    get_modality_config  -> {"video" | "state" | "action" | "language": modality}
    get_action           {"observation": map, "options": map} -> [{NAME: array}, {}]; N1.5 sends the observation itself
                         and gets the first map alone
    reset                -> {}: the next observation begins an episode

A REQ socket without an answer is stuck for ever, so whatever comes is answered. `kill`, which ends the original server,
is refused. A connection is an episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jurybox.protocol.errors import Code, Refused, SpecMismatch, plain, said
from jurybox.protocol.spec import ModelSpec
from jurybox.server.gateway.npy import npy_file
from jurybox.server.gateway.rep_server import RepPeer, RepServer
from jurybox.server.gateway.robots.counters import RobotDelays
from jurybox.server.gateway.robots.door import PATIENCE, RobotDoor
from jurybox.server.gateway.robots.gr00t_observations import gr00t_observation, modality_document
from jurybox.server.gateway.robots.msgpack_arrays import Malformed, packb, unpackb
from jurybox.server.gateway.robots.policy import RobotEpisode
from jurybox.server.security.limits import ROBOTS, Limited
from jurybox.server.settings.endpoints import bound_name, listen

_PONG = {"status": "ok", "message": "Server is running"}
_WHOLE = {"observation", "options"}  # of N1.6


class _Robot:
    """What is kept for a connection."""

    def __init__(self, door: Gr00tDoor, peer: RepPeer[_Robot]) -> None:
        peer.held.enter_context(door.connected())
        self.held = peer.held
        self.delays = RobotDelays(door.counters)
        self.episode: RobotEpisode | None = None


class Gr00tDoor(RobotDoor):
    """A ZeroMQ server for one model; see `RobotDoor`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        socket = listen(self.settings["listen"], self.setting)
        self.bound = bound_name(*socket.getsockname()[:2])
        self._server: RepServer[_Robot] = RepServer(
            socket,
            self.access.max_message,
            self.budget,
            ROBOTS,
            self.doors,
            self.turns,
            begin=lambda peer: _Robot(self, peer),
            answer=self._answer,
            refused=lambda error: packb({"error": said(error, 1000)}),
        )

    @property
    def busy(self) -> bool:
        """Whether a request is in progress."""
        return self._server.busy

    def connections(self) -> list[Limited]:
        """See `RobotDoor.connections`."""
        return self._server.connections()

    async def start(self) -> None:
        """See `RobotDoor.start`."""
        self._server.start()

    async def stop(self) -> None:
        """See `RobotDoor.stop`."""
        await self._server.stop()
        await self.policy.close()

    async def _answer(self, peer: RepPeer[_Robot], body: bytes | None) -> bytes:
        try:
            if body is None:
                raise Malformed("expected one frame from a REQ socket, came another number")
            request = await self.turns.decoded(_read, body)
        except Malformed as error:
            self.counters.failed(error)
            raise
        token = self.access.token
        if token is not None and not token.is_shown_by(f"Bearer {request.get('api_token')}"):
            self.counters.refused["token"] += 1
            raise Refused("Unauthorized: Invalid API token", Code.UNAUTHENTICATED)
        return packb(await self._done(peer.state, request))

    async def _done(self, robot: _Robot, request: dict[str, Any]) -> Any:
        """Return the answer to a request. Raises Error."""
        endpoint, data = request.get("endpoint", "get_action"), request.get("data")
        match endpoint:
            case "ping":
                return _PONG
            case "get_modality_config":
                return modality_document(await self.policy.spec(), self.settings["metadata"], self.settings["like"])
            case "reset":
                if robot.episode is not None:
                    robot.episode.reset()
                return {}
            case "get_action":
                with self.counted(robot.delays):
                    return await self._acted(robot, data)
            case "kill":
                raise Refused("this server is not the robot's own: whoever runs it stops it", Code.UNSUPPORTED)
        raise SpecMismatch(f"endpoint {plain(endpoint, 80)!r}: expected ping, get_modality_config, get_action or reset")

    async def _acted(self, robot: _Robot, data: Any) -> Any:
        whole = isinstance(data, Mapping) and isinstance(data.get("observation"), Mapping) and data.keys() <= _WHOLE
        given = data["observation"] if whole else data
        if not isinstance(given, Mapping):
            raise Malformed(f"expected a map (an observation), came {type(given).__name__}")
        if robot.episode is None:
            robot.episode = await robot.held.enter_async_context(self.policy.episode(PATIENCE))
        observation = gr00t_observation(given)
        if whole and data.get("options"):
            observation.values.update(_options(data["options"], await self.policy.spec()))
        outputs = observation.answer(await robot.episode.infer(observation.values, needs_actions=False))
        actions = {name: _npy(value) for name, value in outputs.items()}
        return [actions, {}] if whole else actions


def _options(given: Any, spec: ModelSpec) -> Mapping[str, Any]:
    """Return the options of a request, which are parameters of the model. Raises Malformed, SpecMismatch."""
    if not isinstance(given, Mapping):
        raise Malformed(f"'options': expected a map, came {type(given).__name__}")
    if unknown := [name for name in given if name not in spec.parameters]:
        what = f"option {plain(unknown[0], 60)!r} is no parameter of model {spec.name!r}"
        raise SpecMismatch(f"{what}; there are: {', '.join(spec.parameters) or 'none'}")
    return given


def _read(body: bytes) -> dict[str, Any]:
    found = unpackb(body)
    if not isinstance(found, dict):
        raise Malformed(f"expected a map with an endpoint, came {type(found).__name__}")
    return found


def _npy(value: Any) -> dict[str, Any]:
    return {"__ndarray_class__": True, "as_npy": npy_file(np.asarray(value))}
