"""The settings of the walls: who may come in, and how much may be sent at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from jurybox.server.endpoints import is_loopback, split_host
from jurybox.server.security.curve import read_pair
from jurybox.server.security.secret_files import read_secret
from jurybox.server.security.token import SHORTEST

OWN_PREFIX = "jurybox-"  # of the server's own shared memory
FILES = ("token_file", "tls_cert", "tls_key", "curve_key", "curve_clients")  # settings that name files or folders


def _check_prefix(text: str) -> str:
    if not text:
        return text
    if not re.fullmatch(r"[\w.-]{1,100}", text, re.ASCII):
        raise ValueError('expected what the names of clients\' shared memory begin with, letters, digits and "_.-"')
    if text.startswith(OWN_PREFIX) or OWN_PREFIX.startswith(text):
        raise ValueError(f"the server's own memory is named {OWN_PREFIX}...: expected another beginning")
    return text


class SecuritySettings(BaseModel):
    """Part of [server]; what each setting means stands in docs/security.md."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    token: SecretStr | None = None
    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    curve_key: str | None = None
    curve_clients: str | None = None
    max_message_mib: int = Field(default=64, ge=1, le=1024)
    shared_memory_prefix: Annotated[str, AfterValidator(_check_prefix)] = ""

    @model_validator(mode="after")
    def _goes_together(self) -> SecuritySettings:
        if self.token is not None and self.token_file is not None:
            raise ValueError("token and token_file both came, expected one of them")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("expected tls_cert and tls_key together, or neither")
        if self.curve_clients is not None and self.curve_key is None:
            raise ValueError("curve_clients came without curve_key, which is the server's own pair of keys")
        return self

    @property
    def max_message(self) -> int:
        """Bytes of the largest message, request body or ZeroMQ frame that is taken."""
        return self.max_message_mib << 20

    def secret_token(self) -> str | None:
        """The token callers must show, if there is one. Raises ValueError, which never names it."""
        if self.token is not None:
            token = self.token.get_secret_value()
        elif self.token_file is not None:
            try:
                token = read_secret(Path(self.token_file)).decode("ascii").strip()
            except UnicodeDecodeError:
                raise ValueError(f"{self.token_file} holds other than ASCII characters") from None
        else:
            return None
        if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError(
                f"a token is at least {SHORTEST} printable ASCII characters without spaces: "
                "make one with: openssl rand -hex 32"
            )
        return token

    def broken_secrets(self) -> list[str]:
        """What is wrong with the files that these settings name, a line each."""
        found = []
        try:
            self.secret_token()
        except ValueError as error:
            found.append(f"server.{'token' if self.token else 'token_file'}: {error}")
        if self.tls_cert is not None and not Path(self.tls_cert).is_file():
            found.append(f"server.tls_cert = {self.tls_cert!r}: there is no such file")
        for name, file, read in (("tls_key", self.tls_key, read_secret), ("curve_key", self.curve_key, read_pair)):
            try:
                if file is not None:
                    read(Path(file))
            except ValueError as error:
                found.append(f"server.{name}: {error}")
        if self.curve_clients is not None and not Path(self.curve_clients).is_dir():
            found.append(f"server.curve_clients = {self.curve_clients!r}: expected a folder of clients' .key files")
        return found

    def open_to_all(self, http: str, grpc: str, tcp: str) -> list[str]:
        """The doors that others than processes of this host reach and that do not ask who they are, a line each."""
        shown = self.token is not None or self.token_file is not None
        found = []
        for name, where in (("http", http), ("grpc", grpc)):
            if where and not is_loopback(split_host(where)[0]):
                lacks = [what for what, there in (("token_file", shown), ("tls_cert", self.tls_cert)) if not there]
                if lacks:
                    found.append(f'server.{name} = "{where}" needs {" and ".join(f"server.{what}" for what in lacks)}')
        if tcp and not is_loopback(split_host(tcp)[0]) and self.curve_clients is None:
            found.append(f'server.tcp = "{tcp}" needs server.curve_key and server.curve_clients')
        return found
