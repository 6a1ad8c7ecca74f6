"""python -m jurybox.server.engine FD: started by the supervisor."""

import sys

from jurybox.protocol import control_pipe
from jurybox.server.engine.process import run

sys.exit(run(control_pipe.attach(int(sys.argv[1]))))
