"""Policies for robots: an action chunking transformer, and LeRobot's checkpoints of it."""

from jurybox.server.robot_policies.act import ActNetwork, ActSizes
from jurybox.server.robot_policies.lerobot import lerobot

__all__ = ["ActNetwork", "ActSizes", "lerobot"]
