"""CAGE Challenge 2: defend a network of 13 hosts, many at once. An own simulator, and an adapter to the real one."""

from .cyborg import CyborgEnv, CyborgMissing
from .environment import CageEnv
from .network import Networks, RedName
from .vector import CageRows, CageVectorEnv

__all__ = ["CageEnv", "CageRows", "CageVectorEnv", "CyborgEnv", "CyborgMissing", "Networks", "RedName"]
