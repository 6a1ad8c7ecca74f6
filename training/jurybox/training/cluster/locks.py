"""Locks for a server's endpoint to other hosts: a token and a certificate, made for it alone. Knows nothing of Ray."""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path


class NoCertificate(RuntimeError):
    """None could be made."""


def locks(folder: Path, host: str) -> tuple[str, str, dict[str, str]]:
    """Make a token, and a key with a certificate for an IP address, as files in `folder`.

    Returns:
        The token, the certificate as PEM, and the settings of [server] that name the files.

    Raises:
        NoCertificate: openssl is not there, or failed.
    """
    token = secrets.token_hex(32)
    _secret(folder / "token", token)
    _secret(folder / "tls.key", "")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "365", "-keyout", "tls.key", "-out", "tls.pem", "-subj", "/CN=jurybox-engine"]
    command += ["-addext", f"subjectAltName=IP:{host}"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoCertificate(
            f"a server at {host}, which others reach, needs a certificate, and openssl made none ({error}): install "
            "openssl on that machine, or let its Ray listen on a loopback address"
        ) from error
    settings = {"token_file": "token", "tls_cert": "tls.pem", "tls_key": "tls.key"}
    return token, (folder / "tls.pem").read_text(), {name: str(folder / file) for name, file in settings.items()}


def _secret(path: Path, content: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)
