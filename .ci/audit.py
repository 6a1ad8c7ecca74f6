"""Check every pinned dependency with the vulnerability service; needs the network.

    .venv/bin/python .ci/audit.py [pip-audit's options, such as -s osv]

Exit status 0: all were checked and none has a known vulnerability; 1: some have; 2: the service was not available, or
did not know all of them, which pip-audit alone reports as clean. There is no offline copy of the service's data.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PINNED = Path(__file__).resolve().parents[1] / "constraints.txt"
FOUND, UNKNOWN = 1, 2


def report(options: list[str]) -> tuple[dict[str, Any] | None, str]:
    """pip-audit's findings and its output; None if the service was not available."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(PINNED), "--no-deps", "--disable-pip"]
    command += ["--format", "json", "--progress-spinner", "off", *options]
    asked = subprocess.run(command, check=False, capture_output=True, text=True)
    try:
        return json.loads(asked.stdout), asked.stderr
    except ValueError:
        return None, asked.stderr


def main() -> int:
    found, said = report(sys.argv[1:])
    if found is None:
        last = said.strip().splitlines()[-1:] or ["pip-audit said nothing"]
        sys.stderr.write(
            f"nothing was audited: {last[0]} ('make setup' installs pip-audit, which must reach the vulnerability "
            "service)\n"
        )
        return UNKNOWN
    unknown = [each for each in found["dependencies"] if "skip_reason" in each]
    weak = [each for each in found["dependencies"] if each.get("vulns")]
    for each in weak:
        for weakness in each["vulns"]:
            fixed = ", ".join(weakness["fix_versions"]) or "no version yet"
            sys.stderr.write(f"{each['name']} {each['version']}: {weakness['id']}, fixed in {fixed}\n")
    asked = len(found["dependencies"])
    known = asked - len(unknown)
    sys.stdout.write(f"{known} of {asked} pinned packages looked up, {len(weak)} with known weaknesses\n")
    if unknown:
        sys.stderr.write(
            f"nothing is known about the others, such as {unknown[0]['name']}: {unknown[0]['skip_reason']}. A package "
            "index without PyPI's JSON interface answers so: ask from a machine that reaches pypi.org, or another "
            "service with -s osv\n"
        )
    return FOUND if weak else UNKNOWN if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
