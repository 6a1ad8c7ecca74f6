"""A treasure hunt on a grid, for several agents that move one after another."""

from jurybox.training.environments.treasure.environment import TreasureHunt
from jurybox.training.environments.treasure.world import Move, TreasureConfig, World

__all__ = ["Move", "TreasureConfig", "TreasureHunt", "World"]
