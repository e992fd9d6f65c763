"""S3 and what speaks its protocol: a `Bucket` on boto3, and `s3://bucket/prefix?setting=value`.

Retries of requests are botocore's ("standard": a budget of retries for the whole client, jitter, up to 20 s between
two): see docs/decisions/010-object-storage.md. Here only what botocore does not know is repeated: a conditional write
that the server refuses because another one runs at this moment (409).

Invariants: one client for each process; no text of an error holds a secret; what the server says is checked for its
shape before it is believed.
Must not know: keys, refs, packs.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import boto3
import botocore.session
import urllib3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectionError,  # noqa: A004 - botocore's own
    CredentialRetrievalError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    SSLError,
    TokenRetrievalError,
)
from botocore.loaders import create_loader

from cas_ckpt import clock
from cas_ckpt.errors import (
    CkptError,
    InvalidInputError,
    OutOfSpaceError,
    PermissionDeniedError,
    StorageError,
    TooLargeError,
    TransientStorageError,
    reworded,
)
from cas_ckpt.storage.bucket import (
    ABSENT,
    Answer,
    ClientOfProcess,
    ConditionFailed,
    Head,
    Listed,
    Page,
    RangeNotThere,
    Upload,
    UploadGone,
    is_clean,
    shown,
    timed,
    whole_reply,
)
from cas_ckpt.storage.object_store import ObjectStore
from cas_ckpt.storage.store import missing
from cas_ckpt.storage.url import (
    BucketUrl,
    choice_setting,
    endpoint_setting,
    flag_setting,
    parse_bucket_url,
    whole_setting,
)

SETTINGS = (
    "endpoint", "region", "profile", "path_style", "sse", "kms_key_id", "storage_class", "requester_pays", "parallel",
    "part_bytes", "checksum",
)  # fmt: skip

_PARALLEL = 16
_MOST_PARALLEL = 256
_PART_BYTES = 8 << 20
_MIN_PART_BYTES = 5 << 20  # S3's own limit
_MOST_PART_BYTES = 256 << 20
_MAX_PARTS = 10_000
_PAGE = 1000
_DELETE_BATCH = 1000
_MOST_UPLOADS_LISTED = 1_000_000

_CONNECT_TIMEOUT_S = 10
_READ_TIMEOUT_S = 60
_ATTEMPTS = 8
"""Of a request: with the pauses between them about a minute and a half before a storm is given up."""

_CONFLICT_ATTEMPTS = 8
_CONFLICT_PAUSE_S = 0.05

_NONCE = "cas-ckpt-nonce"
"""Where the metadata of an object holds the nonce of its write."""

_CONDITION_CODES = frozenset({"PreconditionFailed", "412"})
_CONFLICT_CODES = frozenset({"ConditionalRequestConflict", "OperationAborted", "409"})
_MISSING_CODES = frozenset({"NoSuchKey", "404", "NotFound", "NoSuchVersion"})
_RANGE_CODES = frozenset({"InvalidRange", "416"})
_FULL_CODES = frozenset({"QuotaExceeded", "XMinioStorageFull", "EntityTooLarge", "InsufficientCapacity", "507"})
_TRANSIENT_CODES = frozenset({
    "SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "429", "InternalError",
    "500", "502", "503", "504", "ServiceUnavailable", "RequestTimeout", "BadDigest", "IncompleteBody",
})  # fmt: skip
_ADVICE: Mapping[str, tuple[type[StorageError], str]] = {
    "AccessDenied": (PermissionDeniedError, "no policy allows it, or one denies it: see docs/remotes.md"),
    "AllAccessDisabled": (PermissionDeniedError, "access to this bucket is disabled"),
    "AccountProblem": (PermissionDeniedError, "the account has a problem: ask who pays for it"),
    "403": (PermissionDeniedError, "no policy allows it, or one denies it: see docs/remotes.md"),
    "401": (PermissionDeniedError, "the credentials are not taken"),
    "InvalidAccessKeyId": (PermissionDeniedError, "the access key is not known there: look at profile and endpoint"),
    "SignatureDoesNotMatch": (PermissionDeniedError, "the secret key does not fit the access key, or region is wrong"),
    "ExpiredToken": (PermissionDeniedError, "the credentials have expired: renew them and repeat"),
    "ExpiredTokenException": (PermissionDeniedError, "the credentials have expired: renew them and repeat"),
    "InvalidToken": (PermissionDeniedError, "the session token is not taken: renew the credentials"),
    "TokenRefreshRequired": (PermissionDeniedError, "the credentials must be renewed"),
    "RequestTimeTooSkewed": (PermissionDeniedError, "the clock of this machine is more than 15 minutes off: set it"),
    "RequestExpired": (PermissionDeniedError, "the clock of this machine is wrong: set it"),
    "MethodNotAllowed": (PermissionDeniedError, "the bucket does not allow it (object lock, or no such method)"),
    "ObjectLocked": (PermissionDeniedError, "the object is locked (object lock)"),
    "InvalidObjectState": (PermissionDeniedError, "the object is in an archive class: restore it first"),
    "KMS.DisabledException": (PermissionDeniedError, "the KMS key is disabled"),
    "KMS.NotFoundException": (PermissionDeniedError, "there is no such KMS key"),
    "NoSuchBucket": (StorageError, "there is no such bucket: create it, or look at name, region and endpoint"),
    "PermanentRedirect": (StorageError, "the bucket is in another region: give region= in the URL"),
    "AuthorizationHeaderMalformed": (StorageError, "the region is wrong: give region= in the URL"),
    "IllegalLocationConstraintException": (StorageError, "the region is wrong: give region= in the URL"),
    "NotImplemented": (StorageError, "this service does not do that"),
    "InvalidRequest": (StorageError, "the service does not take it: look at the settings of the URL"),
    "KeyTooLongError": (StorageError, "the name of the object is too long"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Settings of an s3:// URL; never credentials."""

    bucket: str
    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    path_style: str = "auto"
    sse: str | None = None
    kms_key_id: str | None = None
    storage_class: str | None = None
    requester_pays: bool = False
    parallel: int = _PARALLEL
    part_bytes: int = _PART_BYTES
    checksum: str = "crc32"

    @classmethod
    def of(cls, url: BucketUrl) -> S3Settings:
        """Those of `url`.

        Raises:
            InvalidInputError: a value that makes no sense.
        """
        given = url.settings
        sse = choice_setting(url, "sse", ("", "AES256", "aws:kms", "aws:kms:dsse")) or None
        if "kms_key_id" in given and not (sse or "").startswith("aws:kms"):
            raise InvalidInputError("kms_key_id goes with sse=aws:kms (or aws:kms:dsse)")
        return cls(
            url.bucket,
            endpoint=endpoint_setting(url),
            region=given.get("region"),
            profile=given.get("profile"),
            path_style=choice_setting(url, "path_style", ("auto", "true", "false")),
            sse=sse,
            kms_key_id=given.get("kms_key_id"),
            storage_class=given.get("storage_class"),
            requester_pays=flag_setting(url, "requester_pays"),
            parallel=whole_setting(url, "parallel", _PARALLEL, least=1, most=_MOST_PARALLEL),
            part_bytes=whole_setting(url, "part_bytes", _PART_BYTES, least=_MIN_PART_BYTES, most=_MOST_PART_BYTES),
            checksum=choice_setting(url, "checksum", ("crc32", "none")),
        )


def open_s3(url: str) -> ObjectStore:
    """The store at `s3://bucket/prefix?setting=value`; nothing is asked of it yet.

    Raises:
        InvalidInputError: a bucket, prefix or setting that cannot be.
    """
    parsed = parse_bucket_url(url, known=SETTINGS)
    return ObjectStore(S3Bucket(S3Settings.of(parsed)), parsed.prefix, url=str(parsed))


# --- the client ------------------------------------------------------------------------------------


class S3Bucket:
    """The `Bucket` of S3. See `bucket.Bucket` for what each method does."""

    max_parts = _MAX_PARTS
    deleted_at_once = _DELETE_BATCH

    def __init__(self, settings: S3Settings) -> None:
        self.settings = settings
        self.part_bytes = settings.part_bytes
        self.parallel = settings.parallel
        self._session: Any = None
        self._client = ClientOfProcess(self._new_client)
        self._where = f"s3://{settings.bucket}"
        payer = {"RequestPayer": "requester"} if settings.requester_pays else {}
        self._common = {"Bucket": settings.bucket, **payer}
        self._new = _given(
            ServerSideEncryption=settings.sse, SSEKMSKeyId=settings.kms_key_id, StorageClass=settings.storage_class
        )

    def _new_client(self) -> Any:
        settings = self.settings
        self._session = _new_session(settings)
        region = self._session.region_name or ("us-east-1" if settings.endpoint else None)
        return self._session.client("s3", endpoint_url=settings.endpoint, region_name=region, config=_config(settings))

    def close(self) -> None:
        self._client.close()

    def after_fork(self) -> None:
        self._client.after_fork()
        self._session = None

    @contextmanager
    def _asking(self, doing: str, name: str) -> Iterator[Any]:
        """The client. What it raises, and what an answer of another shape leads to, is translated."""
        try:
            yield self._client.get()
        except RecursionError:  # botocore follows a redirection without a region for ever
            raise StorageError(
                f"{doing} {name}: the server redirects to nowhere: look at endpoint and region"
            ) from None
        except Exception as error:
            secrets = self._secrets()
            if not isinstance(error, CkptError):
                raise self._translated(error, doing, name) from (error if is_clean(error, secrets) else None)
            if not is_clean(error, secrets):
                raise error from None
            raise

    def _translated(self, error: Exception, doing: str, name: str) -> CkptError:
        """The typed error, without secrets."""
        if isinstance(error, (ClientError, BotoCoreError, urllib3.exceptions.HTTPError, OSError)):
            found = _of_object(error, name) if isinstance(error, ClientError) else None
            return self._cleaned(found or _error_of(error, f"{doing} {name}", where=self._where))
        if isinstance(error, (KeyError, ValueError, TypeError, AttributeError)):
            return self._cleaned(StorageError(f"{doing} {name}: the answer cannot be read: {error!s:.200}"))
        raise error

    def _cleaned(self, error: CkptError) -> CkptError:
        """`error`, whose text holds no secret and can be shown. A hostile server may send back what it was sent."""
        text = shown(str(error), self._secrets())
        return error if text == str(error) else reworded(error, text)

    def _secrets(self) -> list[str]:
        """Secrets that no message may contain."""
        try:
            credentials = self._session.get_credentials() if self._session is not None else None
            frozen = credentials.get_frozen_credentials() if credentials is not None else None
        except (BotoCoreError, OSError):  # they cannot be had, so none was sent
            return []
        return [text for text in (frozen.secret_key, frozen.token) if text] if frozen is not None else []

    # --- reading ---------------------------------------------------------------------------------

    def read(self, name: str, first: int = 0, length: int | None = None, *, if_version: str | None = None) -> Answer:
        wanted = (
            None if length is None and not first else f"bytes={first}-{'' if length is None else first + length - 1}"
        )
        return self._get(name, _given(Range=wanted, IfMatch=if_version))

    def read_tail(self, name: str, length: int) -> Answer:
        return self._get(name, {"Range": f"bytes=-{length}"})

    def _get(self, name: str, asked: Mapping[str, str]) -> Answer:
        with self._asking("reading", name) as client:
            reply = client.get_object(**self._common, Key=name, **asked)
            body = S3Body(name, reply["Body"])
            try:
                first, length, size = _span_of(reply, ranged="Range" in asked)
                return Answer(size, _version_of(reply), first, length, body)
            except (KeyError, ValueError):
                body.close()
                raise

    def head(self, name: str) -> Head:
        with self._asking("looking at", name) as client:
            reply = client.head_object(**self._common, Key=name)
            return Head(_size(reply["ContentLength"]), _version_of(reply), reply.get("Metadata", {}).get(_NONCE, ""))

    def list_page(self, prefix: str, after: str) -> Page:
        with self._asking("listing", prefix) as client:
            asked = _given(StartAfter=after or None)
            reply = client.list_objects_v2(**self._common, Prefix=prefix, MaxKeys=_PAGE, **asked)
            items = [Listed(str(one["Key"]), _size(one["Size"]), _version_of(one)) for one in reply.get("Contents", ())]
            count, more = int(reply.get("KeyCount", len(items))), bool(reply["IsTruncated"])  # else it is no listing
        if count != len(items):
            raise TransientStorageError(
                f"listing {prefix}: a page of {count} objects came with {len(items)}: cut short"
            )
        return Page(items, more)

    # --- writing ---------------------------------------------------------------------------------

    def put(self, name: str, data: memoryview, *, nonce: str, if_version: str | None = None) -> str:
        asked = {"Body": _payload(data), **self._checksum(data), **self._new, **_condition(if_version)}
        if nonce:
            asked["Metadata"] = {_NONCE: nonce}
        with self._asking("writing", name) as client:
            return self._conditional(name, lambda: client.put_object(**self._common, Key=name, **asked), if_version)

    def begin(self, name: str, *, nonce: str) -> str:
        asked = {"ChecksumAlgorithm": "CRC32"} if self.settings.checksum == "crc32" else {}
        with self._asking("beginning an upload of", name) as client:
            reply = client.create_multipart_upload(
                **self._common, Key=name, Metadata={_NONCE: nonce}, **self._new, **asked
            )
            return str(reply["UploadId"])

    def put_part(self, name: str, upload: str, number: int, data: memoryview) -> str:
        """The tag is the ETag and the checksum of the part."""
        checksum = self._checksum(data)
        with self._asking(f"uploading part {number} of", name) as client:
            reply = client.upload_part(
                **self._common, Key=name, UploadId=upload, PartNumber=number, Body=_payload(data), **checksum
            )
            return f"{reply['ETag']} {checksum.get('ChecksumCRC32', '')}"

    def complete(self, name: str, upload: str, tags: Sequence[str], *, if_version: str | None = None) -> str:
        parts = []
        for number, tag in enumerate(tags, start=1):
            etag, _, checksum = tag.rpartition(" ")
            parts.append({"PartNumber": number, "ETag": etag, **_given(ChecksumCRC32=checksum or None)})
        with self._asking("completing the upload of", name) as client:

            def ask() -> Any:
                return client.complete_multipart_upload(
                    **self._common,
                    Key=name,
                    UploadId=upload,
                    MultipartUpload={"Parts": parts},
                    **_condition(if_version),
                )

            try:
                return self._conditional(name, ask, if_version)
            except ClientError as error:
                if _code_of(error) == "NoSuchUpload":
                    raise UploadGone(f"{name}: there is no such upload") from error
                raise

    def abort(self, name: str, upload: str) -> None:
        with self._asking("aborting the upload of", name) as client:
            try:
                client.abort_multipart_upload(**self._common, Key=name, UploadId=upload)
            except ClientError as error:
                if _code_of(error) != "NoSuchUpload":
                    raise

    def delete(self, names: Sequence[str]) -> dict[str, CkptError]:
        """Up to 1,000 a request."""
        if len(names) == 1:
            return self._delete_one(names[0])
        failed: dict[str, CkptError] = {}
        with self._asking(f"deleting {len(names)} objects from", names[0]) as client:
            objects = [{"Key": name} for name in names]
            reply = client.delete_objects(**self._common, Delete={"Objects": objects, "Quiet": True})
        for one in reply.get("Errors", ()):
            code, name = str(one.get("Code", "")), str(one.get("Key", names[0]))
            if code not in _MISSING_CODES:
                error = _coded(code, str(one.get("Message", "")), f"deleting {name}", self._where)
                failed[name] = self._cleaned(error)
        return failed

    def _delete_one(self, name: str) -> dict[str, CkptError]:
        try:
            with self._asking("deleting", name) as client:
                try:
                    client.delete_object(**self._common, Key=name)
                except ClientError as error:
                    if _code_of(error) not in _MISSING_CODES:
                        raise
        except CkptError as error:
            return {name: error}
        return {}

    def _conditional(self, name: str, ask: Any, if_version: str | None) -> str:
        """The version of what `ask` writes. A write beside another one is refused by 409, and asked for again."""
        attempt, retried = 0, False
        while True:
            attempt += 1
            try:
                return _version_of(ask())
            except ClientError as error:
                # Once repeated, always: the first request of all may be what is there now.
                code, retried = _code_of(error), retried or _retries_of(error) > 0
                if if_version is not None and (
                    code in _CONDITION_CODES or (code in _MISSING_CODES and if_version != ABSENT)
                ):
                    raise ConditionFailed(f"{name}: is not of the expected version", retried=retried) from error
                if code not in _CONFLICT_CODES or if_version is None or attempt == _CONFLICT_ATTEMPTS:
                    raise
            clock.pause(_CONFLICT_PAUSE_S * 2**attempt)

    def _checksum(self, data: memoryview) -> dict[str, str]:
        if self.settings.checksum != "crc32":
            return {}
        crc32 = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode("ascii")
        return {"ChecksumAlgorithm": "CRC32", "ChecksumCRC32": crc32}  # buckets with object lock want both

    # --- uploads that were not finished ---------------------------------------------------------------

    def uploads(self, prefix: str) -> Iterator[Upload]:
        marker: dict[str, str] = {}
        count = 0
        while True:
            with self._asking("listing uploads of", prefix) as client:
                try:
                    reply = client.list_multipart_uploads(**self._common, Prefix=prefix, **marker)
                except ClientError as error:
                    if _code_of(error) in ("NoSuchUpload", "NotImplemented"):  # as some services say "none"
                        return
                    raise
                now_s = _date_s(reply)
                found = [
                    Upload(str(one["Key"]), str(one["UploadId"]), now_s - one["Initiated"].timestamp())
                    for one in reply.get("Uploads", ())
                ]
            yield from found
            if not reply.get("IsTruncated"):
                return
            count += max(len(found), 1)
            if count > _MOST_UPLOADS_LISTED:
                raise TooLargeError(f"listing uploads of {prefix}: more than {_MOST_UPLOADS_LISTED}, without an end")
            after = _given(KeyMarker=reply.get("NextKeyMarker"), UploadIdMarker=reply.get("NextUploadIdMarker"))
            if not after or after == marker:
                raise StorageError(f"listing uploads of {prefix}: a page says that more follow, but not where")
            marker = after

    def upload_bytes(self, name: str, upload: str) -> int:
        size, marker = 0, 0
        with self._asking("looking at an upload of", name) as client:
            while True:
                try:
                    reply = client.list_parts(**self._common, Key=name, UploadId=upload, PartNumberMarker=marker)
                except ClientError as error:
                    if _code_of(error) == "NoSuchUpload":
                        raise UploadGone(f"{name}: there is no such upload") from error
                    raise
                size += sum(_size(part["Size"]) for part in reply.get("Parts", ()))
                after = int(reply.get("NextPartNumberMarker") or 0)
                if not reply.get("IsTruncated") or after <= marker:
                    return size
                if after > self.max_parts:
                    raise TooLargeError(f"looking at an upload of {name}: it has more than {self.max_parts} parts")
                marker = after


class S3Body:
    """The `Body` of an S3 answer."""

    def __init__(self, name: str, stream: Any) -> None:
        self._name = name
        self._stream = stream

    def readinto(self, target: memoryview) -> int:
        try:
            piece = self._stream._raw_stream.read1(target.nbytes)  # what is there: a slow server is noticed above
            target[: len(piece)] = piece
            return len(piece)
        except (BotoCoreError, urllib3.exceptions.HTTPError, OSError) as error:
            raise TransientStorageError(f"reading {self._name}: the connection broke off: {error!s:.200}") from error

    def close(self) -> None:
        self._stream.close()


def _bounded(send: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`send` of botocore's session, which reads whatever is answered, with limits for all but the bytes of objects."""

    def sent(request: Any) -> Any:
        is_streamed = request.stream_output
        request.stream_output = True
        try:
            response = send(request)
        finally:
            request.stream_output = is_streamed
        if not is_streamed or response.status_code >= 300:
            try:
                response._content = whole_reply(response.raw.stream(64 << 10), response.raw.close)
            except (urllib3.exceptions.HTTPError, OSError) as error:
                raise ConnectionClosedError(endpoint_url=request.url, error=error, request=request) from error
        return response

    return sent


_models = create_loader()
"""botocore's description of S3, parsed once for all clients, which takes 0.2 s."""


def _time_answers(http_session: Any) -> None:
    http_session.send = _bounded(http_session.send)
    http_session._pool_classes_by_scheme.update(timed(http_session._pool_classes_by_scheme))


def _timed_clients(create: Callable[..., Any]) -> Callable[..., Any]:
    """`create` of botocore's session, which makes clients of S3 and of what gives credentials (STS)."""

    def created(*args: Any, **kwargs: Any) -> Any:
        client = create(*args, **kwargs)
        _time_answers(client._endpoint.http_session)
        return client

    return created


def _new_session(settings: S3Settings) -> Any:
    below = botocore.session.Session(profile=settings.profile)
    below.create_client = _timed_clients(below.create_client)
    below.register_component("data_loader", _models)
    below.set_default_client_config(
        Config(
            retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
            connect_timeout=_CONNECT_TIMEOUT_S,
            read_timeout=_READ_TIMEOUT_S,
        )
    )
    for provider in below.get_component("credential_provider").providers:
        # Those that ask the instance, or its container, by a session of their own.
        fetcher = getattr(provider, "_role_fetcher", None) or getattr(provider, "_fetcher", None)
        http_session = getattr(fetcher, "_session", None)
        if http_session is not None:
            _time_answers(http_session)
    return boto3.session.Session(botocore_session=below, region_name=settings.region)


def _config(settings: S3Settings) -> Config:
    style = {"auto": "path" if settings.endpoint else "auto", "true": "path", "false": "virtual"}[settings.path_style]
    return Config(
        # Parts of values and the readers above each have as many threads.
        max_pool_connections=2 * settings.parallel,
        tcp_keepalive=True,
        s3={"addressing_style": style},
        # Our own CRC32 goes in a header, which every S3-like service takes or ignores; botocore would send a trailer.
        request_checksum_calculation="when_required",
        # All that is read is verified by its hash above.
        response_checksum_validation="when_required",
        parameter_validation=False,
    )


# --- what came back ------------------------------------------------------------------------------------


def _given(**asked: Any) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if value is not None}


def _condition(if_version: str | None) -> dict[str, str]:
    if if_version is None:
        return {}
    return {"IfNoneMatch": "*"} if if_version == ABSENT else {"IfMatch": if_version}


def _payload(data: memoryview) -> bytearray:
    """`data` as botocore sends it at once; without a copy, if it is the whole of a bytearray.

    A `bytes` becomes a file for botocore: it is announced first (Expect: 100-continue, a round trip), and then sent in
    pieces of 16 KiB. A memoryview cannot be sent again where the vendor retries.
    """
    whole = data.obj
    return whole if isinstance(whole, bytearray) and len(whole) == data.nbytes else bytearray(data)


def _size(value: Any) -> int:
    size = int(value)
    if size < 0:
        raise ValueError(f"a size of {size}")
    return size


def _version_of(reply: Mapping[str, Any]) -> str:
    version = reply["ETag"]
    if not isinstance(version, str) or not version:
        raise ValueError("no ETag")
    return version


def _span_of(reply: Mapping[str, Any], *, ranged: bool) -> tuple[int, int, int]:
    """(first, length, size of the object), from the headers of an answer."""
    length = _size(reply["ContentLength"])
    text = reply.get("ContentRange")
    if text is None:
        return 0, length, length
    unit, _, rest = str(text).partition(" ")
    span, _, size = rest.partition("/")
    first, _, last = span.partition("-")
    if unit != "bytes" or not ranged or int(last) - int(first) + 1 != length or int(last) >= int(size):
        raise ValueError(f"Content-Range {text!r:.80} with a length of {length}")
    return _size(first), length, _size(size)


def _date_s(reply: Mapping[str, Any]) -> float:
    """The server's clock; ours if it does not tell."""
    text = reply["ResponseMetadata"].get("HTTPHeaders", {}).get("date", "")
    try:
        return parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError):
        return clock.now_s()


# --- errors ----------------------------------------------------------------------------------------


def _code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _status_of(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _retries_of(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0))


def _of_object(error: ClientError, name: str) -> CkptError | None:
    """Headers about the object rather than the request."""
    code = _code_of(error)
    if code in _MISSING_CODES:
        return missing(name)
    if code in _CONDITION_CODES:
        return ConditionFailed(f"{name}: is not of the expected version")
    if code in _RANGE_CODES:
        return RangeNotThere(f"{name}: ends before the range begins")
    return None


def _error_of(error: Exception, doing: str, *, where: str) -> CkptError:
    """The typed error for what botocore, or the connection under it, raised."""
    if isinstance(error, ClientError):
        code = _code_of(error)
        if code not in _TRANSIENT_CODES and _status_of(error) in (429, 500, 502, 503, 504):
            code = str(_status_of(error))
        return _coded(code, str(error.response.get("Error", {}).get("Message", "")), doing, where)
    why = f"{error!s:.300}"
    if isinstance(error, (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError, TokenRetrievalError)):
        return PermissionDeniedError(
            f"{doing} in {where}: no credentials that could be used ({why}): set up environment, profile or instance"
        )
    if isinstance(error, ProfileNotFound):
        return InvalidInputError(f"{where}: {why}: look at profile= in the URL and at ~/.aws/config")
    if isinstance(error, NoRegionError):
        return InvalidInputError(f"{where}: no region is known: give region= in the URL")
    if isinstance(error, SSLError):
        return StorageError(f"{doing} in {where}: the server's certificate or TLS is not taken: {why}")
    if isinstance(error, (ConnectionError, HTTPClientError, urllib3.exceptions.HTTPError, OSError)):
        return TransientStorageError(f"{doing} in {where}: {why}: look at endpoint and network, then repeat")
    return StorageError(f"{doing} in {where}: {why}")


def _coded(code: str, message: str, doing: str, where: str) -> CkptError:
    """The typed error for a code of S3."""
    said = f"{code}, {message:.200}" if message else code
    if code in _TRANSIENT_CODES or code in _CONFLICT_CODES:
        return TransientStorageError(f"{doing} in {where}: {said}; it was tried {_ATTEMPTS} times: try later")
    if code in _FULL_CODES:
        return OutOfSpaceError(f"{doing} in {where}: {said}: make room, then repeat")
    kind, advice = _ADVICE.get(code, (StorageError, "look it up in the service's list of errors"))
    return kind(f"{doing} in {where}: {said}: {advice}")
