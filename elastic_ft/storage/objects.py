"""S3, Google and Azure object stores through obstore.

One request per operation: obstore's own retries are off, objects of OBJECT_BYTES go up in a
single PUT of the caller's buffers, uncopied, and ``create`` is a PUT with ``If-None-Match: *``.

S3 is sent each body's SHA-256 (signing computes it anyway), so that it refuses what was damaged on
its way up. A server that doesn't look leaves that to the reader's digests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError
from obstore.exceptions import UnauthenticatedError as Unauthenticated
from obstore.store import AzureStore, GCSStore, S3Store

from elastic_ft.storage.kinds import (
    CONNECT_TIMEOUT_S,
    OBJECT_STORES,
    PIECE_BYTES,
    READ_TIMEOUT_S,
    Bytes,
    FailureKind,
)

STORES: dict[str, Any] = dict(
    zip(OBJECT_STORES, (S3Store, S3Store, GCSStore, GCSStore, AzureStore), strict=True)
)
REQUEST_TIMEOUT_S = 60.0  # an object that takes longer has stalled, unless it is streamed
STREAM_TIMEOUT_S = 24 * 3600.0
CREDENTIALS_TTL = timedelta(minutes=5)  # then they are looked up again: they may have been rotated

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_TRANSPORT = re.compile(r"HttpError \{\s*kind: (\w+)")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_NO_KEYS = ("ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch")
_DAMAGED = ("BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch")


class Objects:
    """The objects of a bucket, or of an Azure container, under a prefix.

    Args:
        protocol: a key of STORES.
        path: "bucket/prefix".
        options: further ones of obstore's store, such as its endpoint.
    """

    def __init__(self, protocol: str, path: str, **options: Any) -> None:
        bucket, _, prefix = path.strip("/").partition("/")
        options["prefix"] = prefix or None
        if STORES[protocol] is S3Store:
            options = _s3_options() | options
        # obstore has deadlines per client, not per request; a client keeps its connections.
        self._client: Callable[[float, float | None], Any] = lru_cache(16)(
            lambda timeout_s, silent_s: STORES[protocol](
                bucket,
                client_options={
                    "allow_http": True,
                    "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
                    "timeout": timedelta(seconds=timeout_s),
                    **({"read_timeout": timedelta(seconds=silent_s)} if silent_s else {}),
                },
                retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
                **options,
            )
        )

    def _store(self, timeout_s: float, silent_s: float | None = READ_TIMEOUT_S) -> Any:
        """A client whose requests end within ``timeout_s`` and a fifth, and REQUEST_TIMEOUT_S.

        ``silent_s``: without a byte; None where a body is sent, which obstore takes for silence.
        """
        return self._client(_rounded(min(timeout_s, REQUEST_TIMEOUT_S)), silent_s)

    def put(self, key: str, parts: Sequence[Bytes], timeout_s: float) -> None:
        obstore.put(self._store(timeout_s, silent_s=None), key, parts, use_multipart=False)

    def create(self, key: str, data: bytes, timeout_s: float) -> bool:
        try:
            obstore.put(self._store(timeout_s), key, data, mode="create")
        except AlreadyExistsError as error:
            if _code(error) == "ConditionalRequestConflict":
                raise
            return False
        return True

    def get(self, key: str, start: int | None, end: int | None, timeout_s: float) -> Bytes:
        options: Any = {"offset": start or 0} if end is None else (start or 0, end)
        if not start and end is None:
            options = None  # an empty object has no range
        try:
            found = obstore.get(
                self._store(timeout_s), key, options={"range": options} if options else None
            )
            return memoryview(found.bytes())
        except BaseError as error:
            if _status(error) == 416:  # the range begins behind the end, as in a short file
                return b""
            raise

    def stream(self, key: str, start: int, end: int, silent_s: float) -> Iterator[Bytes]:
        client = self._client(STREAM_TIMEOUT_S, _rounded(min(silent_s, READ_TIMEOUT_S)))
        try:
            found = obstore.get(client, key, options={"range": (start, end)})
            yield from found.stream(min_chunk_size=PIECE_BYTES)
        except BaseError as error:
            if _status(error) != 416:  # as in ``get``
                raise

    def size(self, key: str, timeout_s: float) -> int:
        return int(obstore.head(self._store(timeout_s), key)["size"])

    def list(self, prefix: str, timeout_s: float, after: str = "") -> list[str]:
        folder = prefix.strip("/") or None
        pages = obstore.list(self._store(timeout_s), folder, offset=after or None)
        return [found["path"] for page in pages for found in page]

    def delete(self, key: str, timeout_s: float) -> None:
        obstore.delete(self._store(timeout_s), key)


def _rounded(timeout_s: float) -> float:
    """Up, by at most a fifth: few clients serve all deadlines."""
    return float(2 ** (math.ceil(math.log2(timeout_s) * 4) / 4))


def _s3_options() -> dict[str, Any]:
    """Keys and region from where botocore finds them: environment, files, the machine's role."""
    from botocore.exceptions import NoCredentialsError  # type: ignore[import-untyped]
    from botocore.session import get_session  # type: ignore[import-untyped]

    session = get_session()
    region = session.get_config_variable("region")

    def credentials() -> dict[str, Any]:
        found = session.get_credentials()
        if found is None:
            raise NoCredentialsError
        keys = found.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": datetime.now(UTC) + CREDENTIALS_TTL,
        }

    options = {
        "credential_provider": credentials,
        "checksum_algorithm": "sha256",
        "disable_bulk_delete": True,  # of one key at a time it would be no gain
    }
    return options | ({"region": region} if region else {})


# ------------------------------------------------------------------------------- errors


def explain(error: BaseException) -> tuple[FailureKind, str] | None:
    """What went wrong, and one line about it; None if it is none of obstore's errors."""
    status, code = _status(error), _code(error)
    if not isinstance(error, BaseError) and status is None:
        return None
    why = _why(error, code)
    if code in _NO_BUCKET:
        return FailureKind.NO_BUCKET, why
    if isinstance(error, FileNotFoundError):
        return FailureKind.MISSING, why
    if isinstance(error, (PermissionDeniedError, Unauthenticated)) or code in _NO_KEYS:
        return FailureKind.FORBIDDEN, why
    if code == "ConditionalRequestConflict":
        return FailureKind.CONFLICT, why
    if code == "SlowDown" or status == 429 or (status or 0) >= 500:
        return FailureKind.BUSY, why
    if code in _DAMAGED or status is None:  # without a status there was no whole answer
        return FailureKind.UNREACHABLE, why
    return FailureKind.FAILED, why


def _why(error: BaseException, code: str) -> str:
    """The server's own words where it has any; obstore wraps them in its whole request."""
    text = str(error).partition("\n\nDebug source")[0]
    if found := _MESSAGE.search(text):
        return " ".join(f"{code}: {found[1]}".split())[:300]
    for wrapping in (" - ", "credential provider: "):
        text = text.rpartition(wrapping)[2]
    transport = _TRANSPORT.search(str(error))
    more = f" ({transport[1].lower()})" if transport else ""
    return " ".join(text.split())[:300] + more


def _status(error: BaseException) -> int | None:
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def _code(error: BaseException) -> str:
    found = _CODE.search(str(error))
    return found[1] if found else ""
