"""The token that HTTP and gRPC callers show."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

SHORTEST = 16  # characters
CHALLENGES = ("Bearer", 'Basic realm="jurybox", charset="UTF-8"')  # the second lets a browser ask its user


class Token:
    """What is compared with what callers show, in a time that tells nothing about it.

    Kept and compared as a digest: `compare_digest` alone would tell the token's length.
    """

    def __init__(self, secret: str) -> None:
        self._digest = _digest(secret)

    def __repr__(self) -> str:
        return "Token(...)"

    def is_shown_by(self, authorization: str | None) -> bool:
        """Whether an Authorization header is right: ``Bearer TOKEN``, or ``Basic`` with the token as password."""
        scheme, _, given = (authorization or "").partition(" ")
        shown = given.strip() if scheme.lower() == "bearer" else _password(given) if scheme.lower() == "basic" else ""
        return hmac.compare_digest(_digest(shown), self._digest)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _password(given: str) -> str:
    try:
        return base64.b64decode(given.strip(), validate=True).decode("utf-8").partition(":")[2]
    except (binascii.Error, ValueError):
        return ""
