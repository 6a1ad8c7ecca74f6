"""CAGE Challenge 2: defend a network of 13 hosts. A vectorised simulator, and an adapter to CybORG."""

from jurybox.studies.workflow.cage.cyborg import CyborgEnv, CyborgMissing
from jurybox.studies.workflow.cage.environment import CageEnv, CageRows, CageVectorEnv
from jurybox.studies.workflow.cage.network import Networks, RedName

__all__ = ["CageEnv", "CageRows", "CageVectorEnv", "CyborgEnv", "CyborgMissing", "Networks", "RedName"]
