"""CAGE Challenge 2: defend a network of 13 hosts. A vectorised simulator, and an adapter to CybORG."""

from jurybox.training.environments.cage.cyborg import CyborgEnv, CyborgMissing
from jurybox.training.environments.cage.environment import CageEnv, CageRows, CageVectorEnv
from jurybox.training.environments.cage.network import Networks, RedName

__all__ = ["CageEnv", "CageRows", "CageVectorEnv", "CyborgEnv", "CyborgMissing", "Networks", "RedName"]
