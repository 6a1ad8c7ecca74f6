"""Write the packages of each kind of install as CycloneDX: `make sbom`. Needs uv and the package index, no engine.

    .venv/bin/python .ci/sbom.py [--out sbom]

Versions are those of constraints.txt, hashes are those of the index. Lists must be complete: a package without a
version, or a kind that cannot be resolved, ends it with exit status 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = {
    "client": [],
    "client-grpc": ["grpc"],
    "server": ["server", "otel"],
    "training": ["server", "training", "otel"],
}


def resolved(extras: list[str]) -> str:
    """The packages of an install with these extras, as a requirements file with hashes."""
    uv = Path(sys.executable).with_name("uv")
    command = [str(uv), "pip", "compile", "--quiet", "--no-config", str(ROOT / "pyproject.toml"), "--no-header"]
    command += ["--constraints", str(ROOT / "constraints.txt"), "--generate-hashes", "--no-annotate"]
    command += [word for extra in extras for word in ("--extra", extra)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{extras or 'a plain install'} cannot be resolved:\n{done.stderr}")
    return done.stdout


def listed(requirements: str) -> dict[str, object]:
    """The CycloneDX document of a requirements file."""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "requirements.txt", Path(folder) / "out.json"
        file.write_text(requirements)
        command = [sys.executable, "-m", "cyclonedx_py", "requirements", str(file), "--output-reproducible"]
        command += ["--pyproject", str(ROOT / "pyproject.toml"), "--output-file", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"cyclonedx-py: {done.stderr}")
        document: dict[str, object] = json.loads(out.read_text())
        return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "sbom")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for kind, extras in KINDS.items():
        wanted = resolved(extras)
        document = listed(wanted)
        components = document["components"]
        assert isinstance(components, list)
        count = sum("==" in line for line in wanted.splitlines())
        nameless = [each["name"] for each in components if not each.get("version")]
        if len(components) != count or nameless:
            sys.exit(f"{kind}: {len(components)} components of {count} packages; without a version: {nameless}")
        (out / f"{kind}.cdx.json").write_text(json.dumps(document, indent=2) + "\n")
        sys.stdout.write(f"{kind}: {count} packages\n")


if __name__ == "__main__":
    main()
