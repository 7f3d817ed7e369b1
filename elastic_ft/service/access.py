"""Who may: a token says who somebody is, the config what that one may read and change.

Tokens are known here by their digests alone. Without any user the service is for whoever reaches
this machine's loopback.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from elastic_ft.errors import ConfigError, UsageError

TOKEN_BYTES = 32
ANY = "*"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class NotAllowed(UsageError):
    """Whoever asks may not. ``known``: it is known who that is."""

    def __init__(self, message: str, known: bool = True) -> None:
        super().__init__(message)
        self.known = known


@dataclass(frozen=True, slots=True)
class Rights:
    """Queues; ``ANY`` is all of them. Who may change a queue's jobs may read them."""

    token_sha256: str
    read: tuple[str, ...] = (ANY,)
    write: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Caller:
    """``name``: "" where nobody has to say."""

    name: str
    rights: Rights | None = None

    def may_read(self, queue: str) -> bool:
        rights = self.rights
        return rights is None or bool({ANY, queue} & {*rights.read, *rights.write})

    def may_write(self, queue: str) -> bool:
        return self.rights is None or bool({ANY, queue} & {*self.rights.write})

    def check_write(self, queue: str) -> None:
        """Raises NotAllowed."""
        if not self.may_write(queue):
            raise NotAllowed(f"{self.name} may not change jobs of queue {queue:.100}")

    def check_writes(self) -> None:
        """Raises NotAllowed where there is nothing that it may change."""
        if self.rights is not None and not self.rights.write:
            raise NotAllowed(f"{self.name} may read alone")

    def check_all(self) -> None:
        """Raises NotAllowed."""
        if self.rights is not None and ANY not in self.rights.write:
            raise NotAllowed(
                f"{self.name} may not stop the service: that takes write on all queues"
            )


def caller_of(users: Mapping[str, Rights], token: str) -> Caller:
    """Raises NotAllowed."""
    if not users:
        return Caller("")
    digest = token_digest(token)
    for name, rights in users.items():
        if hmac.compare_digest(rights.token_sha256, digest):
            return Caller(name, rights)
    raise NotAllowed("a token that the service knows is needed" if token else "no token", False)


def check_site(users: Mapping[str, Rights], host: str, origin: str | None) -> None:
    """Raises NotAllowed for what a page of another site does by the browser of somebody here: one
    whose name was made to point here, too. ``origin``: of a change, if it is said."""
    try:
        named, site = urlsplit(f"//{host}").hostname, urlsplit(origin or "").netloc
    except ValueError:
        named, site = None, ""
    if not users and named not in LOOPBACK:
        raise NotAllowed(f"Host: expected this machine's loopback, found {host!r:.100}")
    if origin is not None and site.lower() != host.lower():
        raise NotAllowed(f"Origin: expected {host:.100}, found {origin!r:.100}")


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def new_token(path: Path) -> str:
    """Writes a new token to a file that must not exist yet, for its owner's eyes; returns its
    digest. Raises ConfigError."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    return token_digest(token)


def read_token(path: Path) -> str:
    """Raises ConfigError: also where others may read it."""
    try:
        mode, token = path.stat().st_mode, path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"{path}: no token can be read there: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a token") from None
    if mode & 0o077:
        raise ConfigError(f"{path}: others may read this token: expected mode 0600")
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"{path}: not a token")
    return token


def check_host(host: str, users: Mapping[str, Rights]) -> None:
    """Raises ConfigError where anybody in the network could do anything."""
    if host not in LOOPBACK and not users:
        raise ConfigError(
            f"--host: {host} is not this machine's loopback: expected users in --config"
        )
