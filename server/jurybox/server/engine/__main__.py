"""python -m jurybox.server.engine FD: started by the supervisor."""

import sys

from jurybox.processes import attach
from jurybox.server.engine.process import run

sys.exit(run(attach(int(sys.argv[1]))))
