"""TLS is verified, for S3 and for Cloud Storage: a server that nobody vouches for hears nothing of what is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.retries import standard
from cryptography.hazmat.primitives.asymmetric import rsa

from cas_ckpt.errors import StorageError, TransientStorageError
from cas_ckpt.storage.url import open_store
from tests.servers import GcsServer, S3Server
from tests.tls import TlsFront, certificate_file, new_key

BUNDLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")

Front = Callable[..., tuple[TlsFront, str, Path]]


@pytest.fixture(scope="module")
def key() -> rsa.RSAPrivateKey:
    return new_key()


@pytest.fixture(params=["s3", "gcs"])
def front(
    request: pytest.FixtureRequest, key: rsa.RSAPrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Front]:
    """Makes a server with TLS of a new bucket: it, the URL of a store there, and the file of its certificate."""
    server: S3Server | GcsServer = request.getfixturevalue(request.param)
    fronts = []
    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda self, context: 0.001)
    for name in BUNDLES:
        monkeypatch.delenv(name, raising=False)

    def made(**certificate: Any) -> tuple[TlsFront, str, Path]:
        file = certificate_file(tmp_path / "certificate.pem", key, **certificate)
        fronts.append(TlsFront(server.endpoint, file).__enter__())
        more = {} if request.param == "s3" else {"anonymous": "true"}
        return fronts[0], type(server)(fronts[0].endpoint).url(server.new_bucket(), **more), file

    yield made
    for each in fronts:
        each.__exit__()


def refusal(url: str) -> StorageError:
    """What asking the store raises."""
    store = open_store(url)
    try:
        with pytest.raises(StorageError, match=r"refs/main.*certificate or TLS is not taken") as caught:
            store.put("refs/main", b"a secret")
    finally:
        store.close()
    assert not isinstance(caught.value, TransientStorageError), "another try would fare no better"
    return caught.value


def test_a_certificate_that_nobody_vouches_for_is_refused(front: Front) -> None:
    server, url, _ = front()
    refusal(url)
    assert server.num_bytes == 0


@pytest.mark.parametrize("certificate", [{"address": "10.1.2.3"}, {"ends_in_s": -60.0}], ids=["other host", "expired"])
def test_a_certificate_of_another_host_or_time_is_refused_whoever_vouches_for_it(
    front: Front, monkeypatch: pytest.MonkeyPatch, certificate: dict[str, Any]
) -> None:
    server, url, file = front(**certificate)
    for name in BUNDLES:
        monkeypatch.setenv(name, str(file))
    refusal(url)
    assert server.num_bytes == 0


@pytest.mark.parametrize("variable", BUNDLES)
def test_a_bundle_of_authorities_is_taken_from_where_the_vendors_clients_have_it(
    front: Front, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    server, url, file = front()
    if url.startswith("gs:") and variable == "AWS_CA_BUNDLE":
        pytest.skip("a variable of Amazon's")
    monkeypatch.setenv(variable, str(file))
    store = open_store(url)
    store.put("refs/main", b"a secret")
    assert store.get("refs/main") == b"a secret"
    assert server.num_bytes > 0
    store.close()
