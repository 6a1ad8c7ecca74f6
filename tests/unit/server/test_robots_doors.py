"""The doors for robots of GR00T and LeRobot, with a model that needs no engine, and what all doors do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
import zmq.asyncio
from tests.lerobot_classes import NEW, lerobot_classes

from jurybox.protocol.errors import Busy, Code, Refused, RowFailed, SpecMismatch
from jurybox.protocol.spec import ModelSpec, Parameter, TensorSpec
from jurybox.server.frontend.frontend import Frontend
from jurybox.server.gateway.npy import npy_file
from jurybox.server.gateway.robots import lerobot, lerobot_robots
from jurybox.server.gateway.robots.counters import RobotDelays
from jurybox.server.gateway.robots.door import RobotDoor, door
from jurybox.server.gateway.robots.msgpack_arrays import packb, unpackb
from jurybox.server.gateway.robots.policy import RobotEpisode
from jurybox.server.security.access import Access
from jurybox.server.security.limits import RECEIVED

