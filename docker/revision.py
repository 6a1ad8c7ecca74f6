"""Record the commit that an image is built from, as the source of the installed jurybox (PEP 610).

python docker/revision.py .git
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import distribution
from pathlib import Path

from jurybox.protocol.revision import checked_out


def record(git: Path) -> None:
    """Write direct_url.json, in which `source_revision` finds the commit; nothing if there is none."""
    commit = checked_out(git)
    if commit is None:
        return
    files = distribution("jurybox").files or ()
    metadata = next(Path(str(file.locate())) for file in files if file.name == "METADATA")
    source = {"url": "file:///src", "vcs_info": {"vcs": "git", "commit_id": commit}}
    metadata.with_name("direct_url.json").write_text(json.dumps(source))


if __name__ == "__main__":
    record(Path(sys.argv[1]))
