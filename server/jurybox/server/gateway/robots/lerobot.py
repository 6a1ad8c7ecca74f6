"""LeRobot's asynchronous inference: gRPC, transport.AsyncInference, with pickles of three of LeRobot's classes.

    Ready                   -> begins an episode
    SendPolicyInstructions  the robot's features; whoever cannot be answered is told here, where a person sees it
    SendObservations        stream -> kept until GetActions; a newer one takes its place
    GetActions              -> the actions for it; empty after two seconds without one

A robot asks for actions in a loop without a pause, also after an error, so errors wait a second. It is one connection.
Its first versions call the package async_inference, and StreamActions what is GetActions now.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np

from jurybox.protocol.errors import Error, Refused, plain, said
from jurybox.server.gateway.grpc_server import GrpcServer, Service
from jurybox.server.gateway.robots.counters import RobotDelays
from jurybox.server.gateway.robots.door import PATIENCE, RobotDoor
from jurybox.server.gateway.robots.lerobot_features import RobotFeatures
from jurybox.server.gateway.robots.lerobot_messages import Observed, actions_message, joined, observed, setup_of
from jurybox.server.gateway.robots.lerobot_robots import LeRobotRobot, LeRobotRobots
from jurybox.server.gateway.robots.policy import ACTIONS
from jurybox.server.security.limits import ROBOTS, Charge, Limited

_PACKAGES = ("transport", "async_inference")
_WAIT = 2.0  # seconds that GetActions waits for an observation
_PAUSE = 1.0  # seconds before an error of GetActions, which is asked for again at once
_log = logging.getLogger("jurybox.gateway.robots")


class LeRobotDoor(RobotDoor):
    """A gRPC server for one model; see `RobotDoor`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        services = [Service(f"{package}.AsyncInference", None, self, self._add_to(package)) for package in _PACKAGES]
        self._server = GrpcServer(
            self.settings["listen"],
            services,
            self._reasons,
            self.access,
            self.settings["grpc_http2"],
            doors=self.doors,
            budget=self.budget,
            turns=self.turns,
            setting=self.setting,
        )
        self.bound, self.ended = self._server.bound, self._server.ended
        self._robots = LeRobotRobots(self.budget, ROBOTS)
        self._delays = RobotDelays(self.counters)

    @property
    def busy(self) -> bool:
        """Whether a request is in progress."""
        return self._server.busy

    def connections(self) -> list[Limited]:
        """See `RobotDoor.connections`."""
        return list(self._server.connections())

    async def start(self) -> None:
        """See `RobotDoor.start`."""
        await self._server.start()

    async def stop(self) -> None:
        """See `RobotDoor.stop`."""
        await self._server.stop()
        await self._robots.close()
        await self.policy.close()

    async def ready(self, _request: bytes, context: Any) -> bytes:
        """Begin an episode."""
        robot = self._robots.of(context, new=True)
        async with robot.lock:
            robot.begin()
            if robot.episode is None:
                robot.episode = await robot.held.enter_async_context(self.policy.episode(PATIENCE))
                robot.held.enter_context(self.connected())
            robot.episode.reset()
        return b""

    async def instruct(self, request: bytes, context: Any) -> bytes:
        """Take a robot's features. Raises SpecMismatch: it can never be answered."""
        robot, setup = self._robots.of(context), setup_of(request)
        try:
            robot.features, robot.most = RobotFeatures(setup, await self.policy.spec()), setup.most
        except Error as error:
            _log.warning("robots.%s: a robot is refused: %s", self.name, said(error, 300))
            raise
        model = self.settings["model"]
        _log.info("robots.%s: a robot that asks for %s gets model %r", self.name, plain(setup.policy, 200), model)
        return b""

    async def observe(self, messages: AsyncIterator[bytes], context: Any) -> bytes:
        """Keep an observation, in place of one that waits."""
        robot = self._robots.of(context)
        charge = Charge(self.budget, robot.account)
        kept = False
        try:
            body = await joined(messages, charge, self.access.max_message)
            charge.take(len(body))  # and its arrays
            found = await self.turns.decoded(observed, body)
            kept = robot.keep(found, charge)
        except Error as error:
            self.counters.failed(error)
            raise
        finally:
            if not kept:
                charge.give()
        return b""

    async def act(self, _request: bytes, context: Any) -> bytes:
        """Return the actions for the observation that waits; nothing if none comes in time."""
        try:
            robot = self._robots.of(context)
            with robot.asking():
                try:
                    await self.doors.message(robot.came.wait(), _WAIT)
                except TimeoutError:
                    return b""
                if (waiting := robot.take()) is None:
                    return b""
                try:
                    with self.counted(self._delays):
                        return await self._acted(robot, waiting[0])
                finally:
                    waiting[1].give()
        except Error:
            await asyncio.sleep(_PAUSE)
            raise

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """Do what `act` does, as robots of the first versions ask for it."""
        yield await self.act(request, context)

    async def _acted(self, robot: LeRobotRobot, found: Observed) -> bytes:
        if robot.episode is None:
            raise Refused("expected Ready before any other call of a connection")
        values = robot.features.inputs(found.values)
        robot.answering(found)
        try:
            outputs = await robot.episode.infer(values, needs_actions=True)
        except BaseException:
            robot.failed(found)
            raise
        actions = np.asarray(outputs.get(ACTIONS, next(iter(outputs.values()))), np.float32)
        return actions_message(found, np.atleast_2d(actions)[: robot.most], self.settings["fps"])

    async def _reasons(self) -> list[str]:
        return []

    def _add_to(self, package: str) -> Any:
        plain_bytes = {"request_deserializer": bytes, "response_serializer": bytes}
        handlers = {
            "Ready": grpc.unary_unary_rpc_method_handler(self.ready, **plain_bytes),
            "SendPolicyInstructions": grpc.unary_unary_rpc_method_handler(self.instruct, **plain_bytes),
            "SendObservations": grpc.stream_unary_rpc_method_handler(self.observe, **plain_bytes),
            "GetActions": grpc.unary_unary_rpc_method_handler(self.act, **plain_bytes),
            "StreamActions": grpc.unary_stream_rpc_method_handler(self.stream, **plain_bytes),
        }
        handler = grpc.method_handlers_generic_handler(f"{package}.AsyncInference", handlers)
        return lambda servicer, server: server.add_generic_rpc_handlers((handler,))
