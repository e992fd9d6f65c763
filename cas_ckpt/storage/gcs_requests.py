"""Requests to Google Cloud Storage: credentials, connections, retries, limits, and what an answer's status means.

`Requests` has google-cloud-storage's client of this process. `Requests.asking("reading x")` is one operation, sent
again where that may help: google.api_core's `Retry` decides when (random pauses that grow, a deadline), a budget of
the whole store keeps a storm from being fed, and `num_retries` says whether an answer may be about our own request.

Invariants: an answer takes bounded memory and time before it is believed; no redirection is followed, so credentials
go to one host; no text of an error holds a token or a control character.
Must not know: objects, parts, conditions.
"""

from __future__ import annotations

import base64
import http.client
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import google.auth
import google.auth.exceptions
import google_crc32c
import requests
import urllib3
from google.api_core.exceptions import RetryError
from google.api_core.retry import Retry
from google.auth.credentials import AnonymousCredentials
from google.auth.transport.requests import Request
from google.cloud import storage
from requests.adapters import HTTPAdapter

from cas_ckpt import clock
from cas_ckpt.errors import (
    CkptError,
    CorruptionError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
    reworded,
)
from cas_ckpt.storage.bucket import ClientOfProcess, is_clean, shown, timed, whole_reply

T = TypeVar("T")

_CONNECT_TIMEOUT_S = 10
_READ_TIMEOUT_S = 60
_DEADLINE_S = 90
"""No retry begins later than this after the first try."""

_TOKEN_RETRIES = 3
"""Of a request for credentials, as in Google's library."""

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 10.0

_RECEIVE_BYTES = 64 << 10
"""Asked of a connection at once. Memory for so much is taken each time, though mostly less comes."""

_SUMMED_BYTES = 256 << 10

_BUDGET = 500
_RETRY_COST = 5
"""A retry takes so much of the budget, and a request that succeeds gives 1 back. So all threads together may retry a
hundred times in a row, and after that once for every five requests that succeed."""

_SUCCESS = frozenset({200, 204, 206})
_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
_BROKEN_OFF = (
    requests.exceptions.ConnectionError, requests.exceptions.Timeout, requests.exceptions.ChunkedEncodingError,
    requests.exceptions.ContentDecodingError, urllib3.exceptions.HTTPError, http.client.HTTPException, OSError,
    google.auth.exceptions.TransportError,
)  # fmt: skip

_ADVICE = {
    400: "the service does not take the request: look at the settings of the URL",
    401: "the credentials are not taken, or have expired: renew them (gcloud auth application-default login)",
    403: "these credentials may not do that: see the roles in docs/remotes.md, and user_project if the requester pays",
}


class NotThere(StorageError):
    """404 or 410; `is_bucket`: the service says that the bucket is not there."""

    def __init__(self, message: str, *, is_bucket: bool) -> None:
        super().__init__(message)
        self.is_bucket = is_bucket


class NotMet(StorageError):
    """412: a condition does not hold."""


class UnsatisfiableRange(StorageError):
    """416: the object ends before the range begins."""


class _Status(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}, {message}")
        self.status = status
        self.message = message


class Requests:
    """The client of this process for one bucket. Threads may share it."""

    def __init__(self, *, where: str, endpoint: str | None, anonymous: bool, pool_size: int) -> None:
        """Nothing is looked up or asked yet.

        Args:
            where: Said in errors.
            endpoint: In place of Google's public one.
            anonymous: Look for no credentials.
            pool_size: Connections that are kept.
        """
        self.where = where
        self._endpoint = endpoint
        self._anonymous = anonymous
        self._pool_size = pool_size
        self._client = ClientOfProcess(self._new_client)
        self._lock = threading.RLock()
        self._left = _BUDGET
        self._date: tuple[str, float] | None = None

    def asking(self, doing: str) -> Asking:
        """One operation; `doing` and the bucket are said in its errors."""
        return Asking(self, doing)

    def session(self) -> tuple[Any, str]:
        """The library's session of this process, and the root of all URLs."""
        client = self._client.get()
        return client._http, client.api_endpoint

    def _new_client(self) -> Any:
        anonymous: Any = AnonymousCredentials
        client = storage.Client(
            project=None,  # a bucket's name needs none
            credentials=anonymous() if self._anonymous else _found_credentials(),
            client_options={"api_endpoint": self._endpoint} if self._endpoint else None,
        )
        session = client._http
        _time_answers(session, _Adapter(pool_connections=2, pool_maxsize=self._pool_size, max_retries=0))
        _time_answers(session._auth_request_session, _Adapter(max_retries=_TOKEN_RETRIES))
        return client

    def close(self) -> None:
        """Close the connections; the next request makes new ones."""
        self._client.close()

    def after_fork(self) -> None:
        """In a child process: the connections are the parent's."""
        self._lock = threading.RLock()
        self._client.after_fork()

    # --- retries ---------------------------------------------------------------------------------

    def may_retry(self, error: Exception) -> bool:
        """Whether sending the request again may help, and the budget allows it."""
        if not _is_transient(error):
            return False
        with self._lock:
            if self._left < _RETRY_COST:
                return False
            self._left -= _RETRY_COST
            return True

    def succeeded(self, response: requests.Response) -> None:
        """Note a success, and what the server's clock says."""
        with self._lock:
            self._left = min(self._left + 1, _BUDGET)
        date = response.headers.get("Date")
        if date:
            self._date = date, clock.now_s()

    @property
    def clock_offset_s(self) -> float:
        """How much the server's clock is ahead of ours, by its last answer."""
        if self._date is None:
            return 0.0
        try:
            return parsedate_to_datetime(self._date[0]).timestamp() - self._date[1]
        except (TypeError, ValueError):  # no date that can be read: our clock is as good
            return 0.0

    # --- errors ----------------------------------------------------------------------------------

    def translated(self, error: Exception, doing: str) -> CkptError:
        """The typed error, without secrets: a hostile server may send back what it was sent."""
        found = _error_of(error, f"{doing} in {self.where}")
        text = self.shown(str(found))
        if text != str(found):
            found = reworded(found, text)
        return found

    def shown(self, text: str) -> str:
        """`text` without secrets, and without what would move the cursor of a terminal."""
        return shown(text, self._secrets())

    def is_clean(self, error: BaseException) -> bool:
        """Whether the texts of `error`, and of what it was raised from, hold no secret."""
        return is_clean(error, self._secrets())

    @contextmanager
    def understanding(self, doing: str) -> Iterator[None]:
        """Raise StorageError where an answer has another shape than the service's."""
        try:
            yield
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise StorageError(
                self.shown(f"{doing}: an answer of another shape than the service's: {error!s:.200}")
            ) from (error if self.is_clean(error) else None)

    def _secrets(self) -> list[str]:
        credentials = getattr(self._client.made, "_credentials", None)
        found = (getattr(credentials, name, None) for name in ("token", "refresh_token", "client_secret"))
        return [text for text in found if isinstance(text, str) and text]


class _Adapter(HTTPAdapter):
    """Also by way of a proxy, requests and answers are timed."""

    def proxy_manager_for(self, proxy: str, **kwargs: Any) -> Any:
        is_new = proxy not in self.proxy_manager
        manager: Any = super().proxy_manager_for(proxy, **kwargs)
        if is_new:
            manager.pool_classes_by_scheme = timed(manager.pool_classes_by_scheme)
        return manager


def _time_answers(session: Any, adapter: _Adapter) -> None:
    """Let the answers to `session` be timed."""
    if not getattr(session, "is_mtls", False):  # else its adapter has a certificate
        for scheme in ("https://", "http://"):
            session.mount(scheme, adapter)
    for one in session.adapters.values():
        one.poolmanager.pool_classes_by_scheme = timed(one.poolmanager.pool_classes_by_scheme)


def _found_credentials() -> Any:
    """Credentials from Google's default chain; the services that it asks have to answer in time, too."""
    with requests.Session() as session:
        _time_answers(session, _Adapter(max_retries=_TOKEN_RETRIES))
        return google.auth.default(scopes=storage.Client.SCOPE, request=Request(session))[0]


class Asking:
    """One operation: the same request, sent until it is answered or nothing helps any more.

    Attributes:
        num_retries: So often it was sent again; an earlier try may have been done all the same.
    """

    def __init__(self, of: Requests, doing: str) -> None:
        self._of = of
        self.doing = doing
        self.num_retries = 0

    def json(
        self, method: str, path: str, params: Mapping[str, str], *,
        body: bytes | UploadBody | None = None, headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """The object that is answered; empty, if there is no answer.

        Raises:
            NotThere, NotMet, UnsatisfiableRange: as the service says. CkptError: everything else.
        """
        told = headers or ({"Content-Type": "application/json"} if body is not None else {})

        def ask() -> dict[str, Any]:
            answer = _read_whole(self._sent(method, path, params, told, body))
            if method == "DELETE" or not answer:
                return {}
            try:
                found = json.loads(answer)
            except (ValueError, RecursionError) as error:
                raise StorageError(f"{self.doing}: an answer that is no JSON") from error
            if not isinstance(found, dict):
                raise StorageError(f"{self.doing}: an answer that is no object of JSON")
            return found

        return self._retried(ask)

    def stream(self, path: str, params: Mapping[str, str], headers: Mapping[str, str]) -> requests.Response:
        """The answer to a GET, whose body has not been read."""
        return self._retried(lambda: self._sent("GET", path, params, headers, None))

    def body(self, response: requests.Response, *, length: int, checksum: str | None) -> StreamedBody:
        """The `Body` of `response`; with `checksum` (CRC32C in base64) the bytes are compared with it."""
        return StreamedBody(self, response, length, checksum)

    def failed(self, error: Exception) -> CkptError:
        """The typed error for `error`."""
        return error if isinstance(error, CkptError) else self._of.translated(error, self.doing)

    def _sent(
        self, method: str, path: str, params: Mapping[str, str], headers: Mapping[str, str],
        body: bytes | UploadBody | None,
    ) -> requests.Response:  # fmt: skip
        session, root = self._of.session()
        response: requests.Response = session.request(
            method, f"{root}{path}", params=dict(params), data=body, headers=dict(headers), stream=True,
            timeout=(_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S), allow_redirects=False, hooks={"response": _read_refusal},
        )  # fmt: skip
        if response.status_code not in _SUCCESS:
            raise _Status(response.status_code, self._of.shown(_message_of(response.content)))
        self._of.succeeded(response)
        return response

    def _retried(self, ask: Callable[[], T]) -> T:
        retry = Retry(
            predicate=self._of.may_retry, initial=_FIRST_PAUSE_S, maximum=_LONGEST_PAUSE_S, multiplier=2.0,
            timeout=_DEADLINE_S, on_error=self._note,
        )  # fmt: skip
        try:
            return retry(ask)()
        except CkptError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the vendor's libraries raise is translated
            cause = error.__cause__ if isinstance(error, RetryError) else error
            cause = cause if isinstance(cause, Exception) else error
            raise self.failed(cause) from (cause if self._of.is_clean(cause) else None)

    def _note(self, _error: Exception) -> None:
        self.num_retries += 1


class UploadBody:
    """Metadata and bytes of an object as one `multipart/related` body, sent without a copy, and again if need be."""

    def __init__(self, metadata: Mapping[str, object], data: memoryview) -> None:
        boundary = secrets.token_hex(16)
        self.headers = {"Content-Type": f"multipart/related; boundary={boundary}"}
        told = json.dumps(dict(metadata)).encode("utf-8")
        head = b"--%s\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n%s\r\n--%s\r\nContent-Type: %s\r\n\r\n"
        mark = boundary.encode("ascii")
        self._head = head % (mark, told, mark, b"application/octet-stream")
        self._data = data
        self._tail = b"\r\n--%s--" % mark

    def __len__(self) -> int:
        return len(self._head) + self._data.nbytes + len(self._tail)

    def __iter__(self) -> Iterator[bytes | memoryview]:
        yield self._head
        yield self._data
        yield self._tail


class StreamedBody:
    """The body of an answer, verified against its checksum; implements `Body`."""

    def __init__(self, asking: Asking, response: requests.Response, length: int, checksum: str | None) -> None:
        self._asking = asking
        self._response = response
        self._left = length
        self._checksum = checksum
        self._crc = 0

    def readinto(self, target: memoryview) -> int:
        """See `Body.readinto`.

        Raises:
            CorruptionError: the bytes are not those of the checksum that came with them.
        """
        try:
            piece = self._response.raw.read1(
                min(target.nbytes, _RECEIVE_BYTES)
            )  # what is there: a slow server is noticed above
            got = len(piece)
            target[:got] = piece
        except _BROKEN_OFF as error:
            failed = self._asking.failed(error)
            raise TransientStorageError(f"the connection broke off: {failed}") from error
        self._left -= got
        if self._checksum is not None:
            self._crc = crc32c(target[:got], self._crc)
            if not self._left and base64_crc32c(self._crc) != self._checksum:
                raise CorruptionError(
                    f"{self._asking.doing}: the bytes that came are not those of the object's checksum"
                )
        return got

    def close(self) -> None:
        self._response.close()


def _read_refusal(response: requests.Response, **_: object) -> None:
    """Read what is no success, also where the library goes on by itself (401, with another token)."""
    if response.status_code not in _SUCCESS:
        response._content = _read_whole(response)


def _read_whole(response: requests.Response) -> bytes:
    return whole_reply(response.iter_content(64 << 10), response.close)


def crc32c(data: memoryview, before: int = 0) -> int:
    """CRC32C of what had `before`, and of `data` after it."""
    for at in range(0, data.nbytes, _SUMMED_BYTES):
        before = google_crc32c.extend(before, bytes(data[at : at + _SUMMED_BYTES]))  # it takes `bytes` alone
    return before


def base64_crc32c(crc: int) -> str:
    """A CRC32C as the service writes it."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode("ascii")


# --- what an error means -------------------------------------------------------------------------


def _message_of(answer: bytes) -> str:
    """The error message of the service: JSON, or plain text."""
    try:
        return str(json.loads(answer)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError, RecursionError):
        return answer[:300].decode("utf-8", "replace")


def _is_transient(error: Exception) -> bool:
    if isinstance(error, _Status):
        return error.status in _TRANSIENT
    if isinstance(error, requests.exceptions.SSLError):
        return "EOF" in str(error)  # cut off in the middle; a certificate that is not taken stays so
    return isinstance(error, _BROKEN_OFF)


def _error_of(error: Exception, doing: str) -> CkptError:
    if isinstance(error, _Status):
        return _error_of_status(error, doing)
    # The cause of a broken connection: urllib3 puts it last, after the whole URL and the count of attempts.
    why = f"{getattr(error.args[0] if error.args else None, 'reason', None) or error!s:.300}"
    if isinstance(error, google.auth.exceptions.TransportError):
        return TransientStorageError(f"{doing}: no token could be fetched: {why}")
    if isinstance(error, google.auth.exceptions.GoogleAuthError):
        return PermissionDeniedError(
            f"{doing}: no credentials that could be used ({why}): renew them (gcloud auth application-default login), "
            "name a service account, or say anonymous=true for a public bucket"
        )
    if isinstance(error, requests.exceptions.SSLError) and not _is_transient(error):
        return StorageError(f"{doing}: the server's certificate or TLS is not taken: {why}")
    if isinstance(error, _BROKEN_OFF):
        return TransientStorageError(f"{doing}: {why}: look at endpoint and network, then repeat")
    return StorageError(f"{doing}: {why}")


def _error_of_status(error: _Status, doing: str) -> CkptError:
    status, text = error.status, f"{doing}: {error}"
    if status in _TRANSIENT:
        return TransientStorageError(f"{text}; it was tried for {_DEADLINE_S} s at most: try later")
    if status in (404, 410):
        return NotThere(text, is_bucket="bucket does not exist" in error.message)
    if status == 412:
        return NotMet(text)
    if status == 416:
        return UnsatisfiableRange(text)
    if status in (401, 403):
        return PermissionDeniedError(f"{text}: {_ADVICE[status]}")
    if 300 <= status < 400:
        return StorageError(f"{text}: a redirection, which is not followed: look at endpoint")
    return StorageError(f"{text}: {_ADVICE.get(status, 'look it up in the list of errors of Cloud Storage')}")
