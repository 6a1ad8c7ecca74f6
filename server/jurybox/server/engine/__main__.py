"""python -m jurybox.server.engine FD: started by the supervisor."""

import sys

from jurybox.protocol import lifeline
from jurybox.server.engine.process import run

sys.exit(run(lifeline.attach(int(sys.argv[1]))))
