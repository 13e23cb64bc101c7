"""Who may call: API keys, names of this host, pages of other origins."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from vivace.server.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vivace.config import ServerConfig

    Headers = Sequence[tuple[bytes, bytes]]

PUBLIC_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready", "/favicon.ico"})
PUBLIC_PREFIX = "/static/"
"""The page and its files hold nothing of anybody's; it asks for a key where one is needed."""
WEBSOCKET_KEY_PREFIX = "vivace.key."
"""Browsers cannot set headers of a WebSocket: the key may travel as a subprotocol, in base64url behind this."""

_MAX_KEY_BYTES = 512
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?")
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class KeyRing:
    """The keys that open the server. Compared in constant time, whatever is sent."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def opens(self, key: bytes) -> bool:
        """Whether the key is one of ours; every one is compared."""
        digest = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def check_key(keys: KeyRing, headers: Headers, path: str, *, is_read: bool) -> None:
    """Raises ``invalid_api_key`` unless a key was sent, or none is needed.

    Args:
        is_read: a GET or HEAD, for which the page's own files are open.
    """
    if not len(keys) or (is_read and (path in PUBLIC_PATHS or path.startswith(PUBLIC_PREFIX))):
        return
    sent = _sent_keys(headers)
    if len(sent) != 1 or len(sent[0]) > _MAX_KEY_BYTES or not keys.opens(sent[0]):
        raise ServerError(
            "This server needs a valid API key: Authorization: Bearer KEY, or xi-api-key: KEY.",
            code="invalid_api_key",
        )


def _sent_keys(headers: Headers) -> list[bytes]:
    """All keys in a request's headers; more than one is as wrong as none."""
    sent = []
    for name, value in headers:
        if name == b"xi-api-key":
            sent.append(value.strip())
        elif name == b"authorization":
            scheme, _, key = value.partition(b" ")
            sent.append(key.strip() if scheme.lower() == b"bearer" else b"")
        elif name == b"sec-websocket-protocol":
            sent += [_subprotocol_key(offer.strip()) for offer in value.split(b",") if _is_key(offer.strip())]
    return sent


def _is_key(offer: bytes) -> bool:
    return offer.startswith(WEBSOCKET_KEY_PREFIX.encode())


def _subprotocol_key(offer: bytes) -> bytes:
    encoded = offer[len(WEBSOCKET_KEY_PREFIX) :]
    try:
        return base64.urlsafe_b64decode(encoded + b"=" * (-len(encoded) % 4))
    except (binascii.Error, ValueError):
        return b""


def check_host(config: ServerConfig, headers: Headers, http_version: str) -> str | None:
    """The value of ``Host``; None for an HTTP/1.0 client that sends none.

    A page elsewhere whose name was made to point at this machine still sends its own name.

    Raises:
        ServerError: ``invalid_host`` for none, two, or a malformed one; ``unknown_host``.
    """
    values = [value for name, value in headers if name == b"host"]
    if not values and http_version == "1.0":
        return None
    text = values[0].decode("latin-1") if len(values) == 1 else ""
    match = _HOST.fullmatch(text)
    if match is None:
        raise ServerError("The request needs one valid Host header.", code="invalid_host")
    if not _is_known(config, match.group(1).lower()):
        raise ServerError(
            "This server does not answer to that host name; start it with --allow-host NAME.",
            code="unknown_host",
        )
    return text


def _is_known(config: ServerConfig, name: str) -> bool:
    if name in {allowed.lower() for allowed in config.allowed_hosts}:
        return True
    if config.is_local:
        return name in _LOCAL_NAMES or name == config.host or _is_loopback(name)
    return not config.allowed_hosts  # keys are needed here, so a name alone opens nothing


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def check_origin(config: ServerConfig, headers: Headers, host: str | None) -> str | None:
    """The allowed foreign origin that calls, if one does.

    Raises:
        ServerError: ``forbidden_origin``: a page of another origin that is not allowed.
    """
    origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
    if not origins:
        return None
    origin = origins[0]
    if len(origins) == 1:
        if origin in config.allowed_origins:
            return origin
        if host is not None and _same_site(origin, host):
            return None
    raise ServerError(
        "Pages of this origin may not call; start the server with --allow-origin ORIGIN.",
        code="forbidden_origin",
    )


def _same_site(origin: str, host: str) -> bool:
    """The page came from this very server. The scheme may differ: a proxy in front may speak TLS."""
    try:
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()
    except ValueError:
        return False
