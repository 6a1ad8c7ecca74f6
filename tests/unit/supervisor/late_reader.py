"""A child that reads nothing until the file `go` appears in the folder LATE_READER; then it counts its orders."""

import os
import sys
import time
from pathlib import Path

from jurybox.processes import attach

control_pipe = attach(int(sys.argv[1]))
folder = Path(os.environ["LATE_READER"])
while not (folder / "go").exists():
    time.sleep(0.01)
numbers = []
while (message := control_pipe.receive(20.0)) is not None and message["kind"] != "last":
    if message["kind"] == "order":
        numbers.append(message["number"])
control_pipe.send("read", numbers=len(numbers), ordered=numbers == sorted(numbers))
control_pipe.receive(60.0)  # stays until it is killed: its death would be news as well
