"""An environment that ends its process; its worker imports no more than this."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from jurybox.studies.workflow.cage import CageEnv


class Mortal(CageEnv):
    """Ends its process within its fifth step: the first time only, as `died` then exists."""

    def __init__(self, died: Path) -> None:
        super().__init__(episode_length=100)
        self.died, self.steps = died, 0

    def step(self, action):
        self.steps += 1
        if self.steps == 5 and not self.died.exists():
            self.died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)
