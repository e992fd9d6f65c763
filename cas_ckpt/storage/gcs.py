"""Google Cloud Storage: a `Bucket` over its JSON API, and `gs://bucket/prefix?setting=value`.

Credentials, endpoint, tokens and certificates are google-cloud-storage's (`gcs_requests.py`); the requests are made
here, because the library's own methods copy a body four times, take two requests for more than 8 MiB and read whatever
a server answers (measured: docs/decisions/010-object-storage.md).

The story of a value in parts: 1. each part is an object of its own, `prefix/tmp/UPLOAD/NUMBER`, which no listing of the
store shows; 2. `compose` makes the value of them in one step, under the condition that it is not there, and of exactly
the generations that were written; 3. in the same step the service removes the parts. Multipart uploads of the XML API
know no conditions, and a resumable upload is one stream.

Invariants: one client for each process; no text of an error holds a secret; what the server says is checked for its
shape before it is believed. Versions are generations.
Must not know: keys, refs, packs.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

import requests

from cas_ckpt import clock
from cas_ckpt.errors import (
    CkptError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    TooLargeError,
)
from cas_ckpt.storage.bucket import (
    ABSENT,
    Answer,
    ConditionFailed,
    Head,
    Listed,
    Page,
    RangeNotThere,
    Upload,
    UploadGone,
)
from cas_ckpt.storage.gcs_requests import (
    NotMet,
    NotThere,
    Requests,
    UnsatisfiableRange,
    UploadBody,
    base64_crc32c,
    crc32c,
)
from cas_ckpt.storage.object_store import ObjectStore
from cas_ckpt.storage.store import RESERVED_PART, missing
from cas_ckpt.storage.url import BucketUrl, endpoint_setting, parse_bucket_url, whole_setting

SETTINGS = ("endpoint", "anonymous", "user_project", "kms_key", "storage_class", "parallel", "part_bytes")

_PARALLEL = 16
_MOST_PARALLEL = 256
_PART_BYTES = 8 << 20
_MIN_PART_BYTES = 1 << 20
_MOST_PART_BYTES = 256 << 20
_COMPOSED_AT_ONCE = 32
"""Sources of a `compose` at most."""

_MAX_PARTS = _COMPOSED_AT_ONCE**2
_PAGE = 1000
_MOST_EMPTY_PAGES = 1000
"""Pages without objects in a row; the service may answer a few that say that more follow."""

_MOST_PARTS_LISTED = 1_000_000

_NONCE = "cas-ckpt-nonce"
"""Where the metadata of an object holds the nonce of its write."""

_TARGET = "cas-ckpt-target"
"""Where the metadata of a part holds the name of the object that it is for."""

_PLAIN = {"contentType": "application/octet-stream", "cacheControl": "no-store, no-transform"}
"""Of every object. Without it objects of a public bucket are answered from caches for up to an hour, refs too."""

_GENERATION = re.compile(r"[1-9][0-9]{0,18}")
_RANGE = re.compile(r"bytes ([0-9]{1,18})-(-1|[0-9]{1,18})/([0-9]{1,18})")
_CLASS = re.compile(r"[A-Z_]{1,40}")
_PROJECT = re.compile(r"[a-z0-9.:-]{1,100}")
_KMS_KEY = re.compile(r"projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+")


@dataclass(frozen=True, slots=True)
class GcsSettings:
    """Settings of a gs:// URL; never credentials.

    Attributes:
        endpoint: Of another service than Google's public one: an emulator, or a private one.
        anonymous: Send no credentials.
        user_project: Pays for the requests.
        kms_key: Encrypts what is written.
        storage_class: Of what is written; else the bucket's.
    """

    bucket: str
    endpoint: str | None = None
    anonymous: bool = False
    user_project: str | None = None
    kms_key: str | None = None
    storage_class: str | None = None
    parallel: int = _PARALLEL
    part_bytes: int = _PART_BYTES

    @classmethod
    def of(cls, url: BucketUrl) -> GcsSettings:
        """Those of `url`.

        Raises:
            InvalidInputError: a value that makes no sense.
        """
        given = url.settings
        endpoint = endpoint_setting(url)
        is_open = endpoint is not None and endpoint.startswith("http://")
        anonymous = given.get("anonymous", "true" if is_open else "false")
        if anonymous not in ("true", "false"):
            raise InvalidInputError(f"anonymous={anonymous!r:.40}: wanted true or false")
        if is_open and anonymous == "false":
            raise InvalidInputError(f"endpoint={endpoint!r:.100}: credentials are never sent without TLS: use https://")
        return cls(
            url.bucket,
            endpoint=endpoint,
            anonymous=anonymous == "true",
            user_project=_matching(given, "user_project", _PROJECT, "the id of a project"),
            kms_key=_matching(given, "kms_key", _KMS_KEY, "projects/P/locations/L/keyRings/R/cryptoKeys/K"),
            storage_class=_matching(given, "storage_class", _CLASS, "a class as STANDARD or NEARLINE"),
            parallel=whole_setting(url, "parallel", _PARALLEL, least=1, most=_MOST_PARALLEL),
            part_bytes=whole_setting(url, "part_bytes", _PART_BYTES, least=_MIN_PART_BYTES, most=_MOST_PART_BYTES),
        )


def _matching(given: Mapping[str, str], name: str, pattern: re.Pattern[str], wanted: str) -> str | None:
    text = given.get(name)
    if text is not None and not pattern.fullmatch(text):
        raise InvalidInputError(f"{name}={text!r:.100}: wanted {wanted}")
    return text


def open_gcs(url: str) -> ObjectStore:
    """The store at `gs://bucket/prefix?setting=value`; nothing is asked of it yet.

    Raises:
        InvalidInputError: a bucket, prefix or setting that cannot be.
    """
    parsed = parse_bucket_url(url, known=SETTINGS)
    return ObjectStore(GcsBucket(GcsSettings.of(parsed), parsed.prefix), parsed.prefix, url=str(parsed))


class GcsBucket:
    """The `Bucket` of Google Cloud Storage. See `bucket.Bucket` for what each method does."""

    max_parts = _MAX_PARTS
    deleted_at_once = 1

    def __init__(self, settings: GcsSettings, prefix: str = "") -> None:
        """Nothing is asked of the service yet.

        Args:
            prefix: Of the store's objects: parts of values are below `tmp/` under it.
        """
        self.settings = settings
        self.part_bytes = settings.part_bytes
        self.parallel = settings.parallel
        self._parts = f"{prefix}{RESERVED_PART}/"
        self._requests = Requests(
            where=f"gs://{settings.bucket}",
            endpoint=settings.endpoint,
            anonymous=settings.anonymous,
            # Parts of values and the readers above each have as many threads.
            pool_size=2 * settings.parallel,
        )
        self._service_removes_parts: bool | None = None
        self._may_remove_parts = True
        self._payer = {"userProject": settings.user_project} if settings.user_project else {}
        self._key = {"kmsKeyName": settings.kms_key} if settings.kms_key else {}
        self._class = {"storageClass": settings.storage_class} if settings.storage_class else {}

    def close(self) -> None:
        self._requests.close()

    def after_fork(self) -> None:
        self._requests.after_fork()

    def _bucket_path(self) -> str:
        return f"/storage/v1/b/{quote(self.settings.bucket, safe='')}"

    def _object_path(self, name: str) -> str:
        return f"{self._bucket_path()}/o/{quote(name, safe='')}"

    # --- reading ---------------------------------------------------------------------------------

    def read(self, name: str, first: int = 0, length: int | None = None, *, if_version: str | None = None) -> Answer:
        if length is None and not first:
            return self._get(name, None, if_version)
        return self._get(name, f"bytes={first}-{'' if length is None else first + length - 1}", if_version)

    def read_tail(self, name: str, length: int) -> Answer:
        return self._get(name, f"bytes=-{length}", None)

    def _get(self, name: str, span: str | None, generation: str | None) -> Answer:
        # Stored bytes as they are: with gzip accepted, the service unpacks nothing on the way, nor is it done here.
        headers = {"Accept-Encoding": "gzip", **({"Range": span} if span else {})}
        pinned = {"generation": generation} if generation else {}
        asked = self._requests.asking(f"reading {name}")
        try:
            response = asked.stream(
                f"/download{self._object_path(name)}", {"alt": "media", **pinned, **self._payer}, headers
            )
        except NotThere as error:
            if generation:
                raise ConditionFailed(f"{name}: is not of the generation {generation} any more") from error
            raise self._missing(name, error) from error
        except UnsatisfiableRange as error:
            raise RangeNotThere(f"{name}: ends before the range begins") from error
        try:
            with self._requests.understanding(f"reading {name}"):
                first, length, size = _span_of(response, ranged=span is not None)
                version = _generation(response.headers.get("X-Goog-Generation"))
        except StorageError:
            response.close()
            raise
        whole = _crc_of(response) if span is None else None
        return Answer(size, version, first, length, asked.body(response, length=length, checksum=whole))

    def head(self, name: str) -> Head:
        try:
            found = self._requests.asking(f"looking at {name}").json("GET", self._object_path(name), self._payer)
        except NotThere as error:
            raise self._missing(name, error) from error
        with self._requests.understanding(f"looking at {name}"):
            nonce = (found.get("metadata") or {}).get(_NONCE, "")
            return Head(_size(found["size"]), _generation(found["generation"]), _text(nonce))

    def list_page(self, prefix: str, after: str) -> Page:
        fields = "kind,items(name,size,generation),nextPageToken"
        for items, more in self._pages(prefix, after, fields):
            with self._requests.understanding(f"listing {prefix}"):
                listed = [
                    Listed(_text(one["name"]), _size(one["size"]), _generation(one["generation"])) for one in items
                ]
            listed = [one for one in listed if one.name > after or not after]  # `startOffset` includes itself
            if listed or not more:
                return Page(listed, more)
        return Page((), more=False)

    def _pages(self, prefix: str, start: str, fields: str) -> Iterator[tuple[list[Any], bool]]:
        """(objects as the service tells them, whether more follow), page by page."""
        params = {"prefix": prefix, "maxResults": str(_PAGE), "projection": "noAcl", "fields": fields, **self._payer}
        if start:
            params["startOffset"] = start
        empty = count = 0
        while True:
            try:
                reply = self._requests.asking(f"listing {prefix}").json("GET", f"{self._bucket_path()}/o", params)
            except NotThere as error:
                raise self._no_bucket(f"listing {prefix}") from error
            with self._requests.understanding(f"listing {prefix}"):
                if reply.get("kind") != "storage#objects":
                    raise ValueError("no listing")
                items, token = _list(reply.get("items", [])), reply.get("nextPageToken")
                if token is not None and (not isinstance(token, str) or not token or token == params.get("pageToken")):
                    raise ValueError("a page says that more follow, but not where")
            empty = 0 if items else empty + 1
            if empty > _MOST_EMPTY_PAGES:
                raise StorageError(f"listing {prefix}: {empty} pages without objects, and more are said to follow")
            count += len(items)
            if count > _MOST_PARTS_LISTED:
                raise TooLargeError(
                    f"listing {prefix}: more than {_MOST_PARTS_LISTED} parts: a server that does not end"
                )
            yield items, token is not None
            if token is None:
                return
            params["pageToken"] = token

    # --- writing ---------------------------------------------------------------------------------

    def put(self, name: str, data: memoryview, *, nonce: str, if_version: str | None = None) -> str:
        told = {"metadata": {_NONCE: nonce}} if nonce else {}
        return self._insert(name, data, {**self._class, **told}, _generation_condition(if_version))

    def _insert(self, name: str, data: memoryview, told: Mapping[str, object], condition: Mapping[str, str]) -> str:
        """Write an object by one request, with its checksum, which the service compares; its generation."""
        crc = base64_crc32c(crc32c(data))
        body = UploadBody({"name": name, **_PLAIN, "crc32c": crc, **told}, data)
        params = {"uploadType": "multipart", **condition, **self._payer, **self._key}
        doing = f"writing {name}"
        asked = self._requests.asking(doing)
        try:
            made = asked.json("POST", f"/upload{self._bucket_path()}/o", params, body=body, headers=body.headers)
        except NotMet as error:
            if not condition:
                raise
            raise ConditionFailed(
                f"{name}: is not of the generation that was expected", retried=asked.num_retries > 0
            ) from error
        except NotThere as error:
            raise self._no_bucket(doing) from error
        with self._requests.understanding(doing):
            if made["name"] != name or _size(made["size"]) != data.nbytes:
                raise ValueError(f"{made['size']} bytes were taken of {data.nbytes}")
            return _generation(made["generation"])

    def delete(self, names: Sequence[str]) -> dict[str, CkptError]:
        """A request each."""
        failed = {}
        for name in names:
            try:
                self._delete(name)
            except CkptError as error:
                failed[name] = error
        return failed

    def _delete(self, name: str, generation: str | None = None) -> None:
        pinned = {"generation": generation} if generation else {}
        try:
            self._requests.asking(f"deleting {name}").json("DELETE", self._object_path(name), {**pinned, **self._payer})
        except NotThere as error:
            if error.is_bucket:
                raise self._no_bucket(f"deleting {name}") from error

    # --- values in parts ---------------------------------------------------------------------------

    def begin(self, name: str, *, nonce: str) -> str:
        """No request. The upload is the nonce: it will be in the metadata of the object."""
        return nonce or secrets.token_hex(16)

    def put_part(self, name: str, upload: str, number: int, data: memoryview) -> str:
        """The tag is the part's generation and size.

        A part is created, never replaced: the right to create objects is enough.
        """
        part = self._part_name(upload, f"{number:05}")
        # The bucket's own class may be one in which a removed object is paid for by the month.
        told = {"storageClass": "STANDARD", "metadata": {_TARGET: name}}
        try:
            generation = self._insert(part, data, told, _generation_condition(ABSENT))
        except ConditionFailed as error:
            found = self._requests.asking(f"looking at {part}").json("GET", self._object_path(part), self._payer)
            with self._requests.understanding(f"looking at {part}"):
                if found.get("crc32c") != base64_crc32c(crc32c(data)) or _size(found["size"]) != data.nbytes:
                    raise StorageError(f"{part}: another part is there: two writers share an upload") from error
                generation = _generation(found["generation"])
        return f"{generation} {data.nbytes}"

    def complete(self, name: str, upload: str, tags: Sequence[str], *, if_version: str | None = None) -> str:
        """One request for up to 32 parts, then one for each 32."""
        sources = [
            _Source(self._part_name(upload, f"{number:05}"), generation, int(size))
            for number, (generation, size) in enumerate((tag.split(" ") for tag in tags), start=1)
        ]
        while len(sources) > _COMPOSED_AT_ONCE:
            sources = [
                self._joined(name, upload, sources[at : at + _COMPOSED_AT_ONCE])
                for at in range(0, len(sources), _COMPOSED_AT_ONCE)
            ]
        destination = {**self._class, "metadata": {_NONCE: upload}}
        made = self._compose(name, sources, destination, _generation_condition(if_version), of=name)
        self._tidy(name, upload)
        return made.generation

    def _joined(self, name: str, upload: str, sources: Sequence[_Source]) -> _Source:
        """A part made of others, which it replaces."""
        first = sources[0].name.rpartition("/")[2]
        joined = self._part_name(upload, f"{first}-{len(sources)}")
        destination = {"storageClass": "STANDARD", "metadata": {_TARGET: name}}
        try:
            return self._compose(joined, sources, destination, _generation_condition(ABSENT), of=name)
        except UploadGone as error:
            # The parts are gone: with the attempt whose reply was lost, which has made this one of them.
            try:
                found = self.head(joined)
            except NotFoundError:
                raise error from None
            if found.size != sum(source.size for source in sources):
                raise
            return _Source(joined, found.version, found.size)
        except ConditionFailed as error:
            found = self.head(joined)
            if not error.retried or found.size != sum(source.size for source in sources):
                raise StorageError(f"{joined}: another part is there: two writers share an upload") from error
            return _Source(joined, found.version, found.size)

    def _compose(
        self, name: str, sources: Sequence[_Source], destination: Mapping[str, object], condition: Mapping[str, str],
        *, of: str,
    ) -> _Source:  # fmt: skip
        body: dict[str, object] = {
            "sourceObjects": [
                {
                    "name": one.name,
                    "generation": one.generation,
                    "objectPreconditions": {"ifGenerationMatch": one.generation},
                }
                for one in sources
            ],
            "destination": {**_PLAIN, **destination},
        }
        if self._may_remove_parts:
            body["deleteSourceObjects"] = True
        doing = f"completing the upload of {of}"
        asked = self._requests.asking(doing)
        params = {**condition, **self._payer, **self._key}
        try:
            made = asked.json("POST", f"{self._object_path(name)}/compose", params, body=json.dumps(body).encode())
        except NotMet as error:
            raise ConditionFailed(
                f"{of}: is there already, or a part of it changed", retried=asked.num_retries > 0
            ) from error
        except NotThere as error:
            if error.is_bucket:
                raise self._no_bucket(doing) from error
            raise UploadGone(f"{of}: parts of the upload are gone") from error
        except PermissionDeniedError:
            if not self._may_remove_parts:
                raise
            self._may_remove_parts = False  # an append-only bucket: parts stay, for a lifecycle rule to remove
            return self._compose(name, sources, destination, condition, of=of)
        wanted = sum(source.size for source in sources)
        with self._requests.understanding(doing):
            if _size(made["size"]) != wanted:
                raise ValueError(f"{made['size']} bytes were made of {wanted}")
            return _Source(name, _generation(made["generation"]), wanted)

    def _tidy(self, name: str, upload: str) -> None:
        """Remove the parts of a value that is complete, where the service has not done it (emulators)."""
        if self._service_removes_parts is None:
            self._service_removes_parts = not any(self._parts_of(name, upload))
        if not self._service_removes_parts and self._may_remove_parts:
            self.abort(name, upload)

    def abort(self, name: str, upload: str) -> None:
        for part in list(self._parts_of(name, upload)):
            self._delete(part.name, part.generation)  # by its generation, so that no old version of it stays

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """The age is that of the youngest part."""
        newest: dict[str, tuple[str, float]] = {}
        for page, _ in self._pages(self._parts, "", "kind,items(name,updated,metadata),nextPageToken"):
            with self._requests.understanding(f"listing {self._parts}"):
                for one in page:
                    upload = _text(one["name"]).removeprefix(self._parts).partition("/")[0]
                    target = _text((one.get("metadata") or {}).get(_TARGET, ""))
                    written_s = datetime.fromisoformat(_text(one["updated"])).timestamp()
                    if target.startswith(prefix) and target:
                        newest[upload] = target, max(written_s, newest.get(upload, ("", written_s))[1])
        now_s = clock.now_s() + self._requests.clock_offset_s
        for upload, (target, written_s) in sorted(newest.items()):
            yield Upload(target, upload, now_s - written_s)

    def upload_bytes(self, name: str, upload: str) -> int:
        sizes = [part.size for part in self._parts_of(name, upload)]
        if not sizes:
            raise UploadGone(f"{name}: there is no such upload")
        return sum(sizes)

    def _part_name(self, upload: str, part: str) -> str:
        return f"{self._parts}{upload}/{part}"

    def _parts_of(self, name: str, upload: str) -> Iterator[_Source]:
        for page, _ in self._pages(self._part_name(upload, ""), "", "kind,items(name,size,generation),nextPageToken"):
            with self._requests.understanding(f"listing the parts of {name}"):
                for one in page:
                    if not _text(one["name"]).startswith(self._part_name(upload, "")):
                        raise ValueError(f"{one['name']!r:.200} is not one of them")
                    yield _Source(_text(one["name"]), _generation(one["generation"]), _size(one["size"]))

    # --- errors ----------------------------------------------------------------------------------

    def _missing(self, name: str, error: NotThere) -> CkptError:
        return self._no_bucket(f"reading {name}") if error.is_bucket else missing(name)

    def _no_bucket(self, doing: str) -> StorageError:
        return StorageError(
            f"{doing} in gs://{self.settings.bucket}: there is no such bucket, or not for these credentials: create "
            "it, or look at its name and at user_project"
        )


@dataclass(frozen=True, slots=True)
class _Source:
    """A part as `compose` takes it."""

    name: str
    generation: str
    size: int


def _generation_condition(version: str | None) -> dict[str, str]:
    if version is None:
        return {}
    return {"ifGenerationMatch": "0" if version == ABSENT else version}


# --- what came back ----------------------------------------------------------------------------


def _size(value: object) -> int:
    """A number of bytes, which the service writes as text."""
    text = _text(value)
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ValueError(f"a size of {text!r:.40}")
    return int(text)


def _generation(value: object) -> str:
    text = _text(value)
    if not _GENERATION.fullmatch(text):
        raise ValueError(f"a generation of {text!r:.40}")
    return text


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text wanted, found {type(value).__name__}")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a list wanted, found {type(value).__name__}")
    return value


def _span_of(response: requests.Response, *, ranged: bool) -> tuple[int, int, int]:
    """(first, length, size of the object), from the headers of an answer."""
    told, length = response.headers.get("Content-Range"), response.headers.get("Content-Length")
    if told is None:
        size = _size(response.headers.get("X-Goog-Stored-Content-Length") if length is None else length)
        return 0, size, size
    found = _RANGE.fullmatch(told)
    if not found or not ranged:
        raise ValueError(f"Content-Range {told!r:.80}")
    first, last, size = map(int, found.groups())
    if last >= max(size, 1) or last < first - 1 or (length is not None and _size(length) != last - first + 1):
        raise ValueError(f"Content-Range {told!r:.80} with a length of {length!r:.40}")
    return first, last - first + 1, size


def _crc_of(response: requests.Response) -> str | None:
    """CRC32C of the stored bytes, as the service tells it beside a whole object."""
    found = re.search(r"crc32c=([A-Za-z0-9+/=]{8})(?:,|$)", response.headers.get("X-Goog-Hash", ""))
    return found[1] if found else None
