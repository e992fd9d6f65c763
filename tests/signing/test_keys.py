"""Keys made by ssh-keygen and openssl sign and verify; what cannot be used is refused, and no secret is shown."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, x25519

from cas_ckpt.errors import CkptError, InvalidInputError, StorageError
from cas_ckpt.signing.keys import SigningKey, public_key_of_line, signing_key, verify_signature
from cas_ckpt.signing.sshsig import MalformedSignature, armored, parse_signature
from tests.signing.armor import unarmored

VECTORS = json.loads((Path(__file__).parent / "ssh-keygen.json").read_text())
KEYS: dict[str, Any] = VECTORS["keys"]
MESSAGE: bytes = VECTORS["message"].encode()
USABLE = ["ed25519", "ecdsa256", "ecdsa384", "ecdsa521", "rsa"]


def private(name: str) -> bytes:
    content: str = KEYS[name]["private"]
    return content.encode()


@pytest.mark.parametrize("name", USABLE)
def test_a_signature_by_ssh_keygen_is_verified(name: str) -> None:
    for text in KEYS[name]["signatures"].values():
        signature = parse_signature(unarmored(text))
        verify_signature(signature, MESSAGE)
        assert signature.fingerprint == KEYS[name]["fingerprint"]
        assert armored(signature.blob) == text
        with pytest.raises(MalformedSignature, match="not a signature of these bytes"):
            verify_signature(signature, MESSAGE + b"!")


@pytest.mark.parametrize("name", USABLE)
def test_a_key_of_ssh_keygen_signs_what_is_then_verified(name: str) -> None:
    key = SigningKey.from_bytes(private(name))
    assert key.fingerprint == KEYS[name]["fingerprint"]
    assert public_key_of_line(KEYS[name]["public"])[0] == key.public_key == public_key_of_line(key.public_line)[0]
    signature = parse_signature(key.sign(MESSAGE))
    assert (signature.namespace, signature.hash_name) == ("cas_ckpt", "sha512")
    verify_signature(signature, MESSAGE)


def test_ed25519_signs_as_ssh_keygen_does_byte_for_byte() -> None:
    own = SigningKey.from_bytes(private("ed25519")).sign(MESSAGE)
    assert own == unarmored(KEYS["ed25519"]["signatures"]["cas_ckpt"])


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
@pytest.mark.parametrize("name", USABLE)
def test_ssh_keygen_verifies_our_signatures(name: str, tmp_path: Path) -> None:
    signature, allowed = tmp_path / "m.sig", tmp_path / "allowed_signers"
    signature.write_text(armored(SigningKey.from_bytes(private(name)).sign(MESSAGE)))
    allowed.write_text(f'ann@lab.org namespaces="cas_ckpt" {KEYS[name]["public"]}')
    command = ["ssh-keygen", "-Y", "verify", "-f", allowed, "-I", "ann@lab.org", "-n", "cas_ckpt", "-s", signature]
    done = subprocess.run(command, input=MESSAGE, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert subprocess.run(command, input=MESSAGE + b"!", capture_output=True, check=False).returncode != 0


def test_an_encrypted_key_asks_for_its_passphrase_only_when_it_needs_it() -> None:
    asked = []

    def ask() -> str:
        asked.append(1)
        return "correct horse"

    key = SigningKey.from_bytes(private("ed25519_encrypted"), passphrase=ask)
    assert key.fingerprint == KEYS["ed25519_encrypted"]["fingerprint"]
    SigningKey.from_bytes(private("ed25519"), passphrase=ask)
    assert asked == [1]
    SigningKey.from_bytes(VECTORS["pem"]["ed25519"].encode())
    SigningKey.from_bytes(VECTORS["pem"]["ed25519_encrypted"].encode(), passphrase=b"pw")


@pytest.mark.parametrize("name", ["ed25519_encrypted"])
@pytest.mark.parametrize(("passphrase", "words"), [(None, "give its passphrase"), ("", "give its"), ("no", "not open")])
def test_an_encrypted_key_without_its_passphrase_is_refused(name: str, passphrase: str | None, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        SigningKey.from_bytes(private(name), passphrase=passphrase)
    with pytest.raises(InvalidInputError, match=words):
        SigningKey.from_bytes(VECTORS["pem"][name].encode(), passphrase=passphrase)


def test_a_key_is_read_from_a_file_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "id"
    path.write_bytes(private("ed25519"))
    assert signing_key(str(path)).public_key == signing_key(path).public_key
    with pytest.raises(StorageError, match="No such file"):
        signing_key(tmp_path / "other")
    with pytest.raises(StorageError, match="directory"):
        signing_key(tmp_path)


@pytest.mark.parametrize("given", [
    KEYS["ed25519"]["public"].encode(), b"", b"\0" * 200, b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n",
    private("ed25519")[:200], private("ed25519").replace(b"b3Bl", b"b3Bm", 1), private("ed25519") * 300,
    VECTORS["pem"]["x25519"].encode(), private("rsa1024"), b"-----BEGIN PRIVATE KEY-----\nAAAA\n",
])  # fmt: skip
def test_what_is_no_key_that_can_sign_is_refused(given: bytes) -> None:
    with pytest.raises(InvalidInputError):
        SigningKey.from_bytes(given)


@pytest.mark.parametrize("given", [5, b"key", None, object(), x25519.X25519PrivateKey.generate()])
def test_what_is_no_key_at_all_is_refused(given: Any) -> None:
    with pytest.raises(InvalidInputError):
        signing_key(given)


def test_a_private_key_of_cryptography_will_do() -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    verify_signature(parse_signature(signing_key(key).sign(MESSAGE)), MESSAGE)


def test_no_secret_of_a_key_is_shown_and_it_cannot_be_carried_away() -> None:
    key = SigningKey.from_bytes(private("ed25519"))
    shown = [repr(key), str(key), f"{key!r}", repr([key]), repr({"sign": key})]
    for bad in (private("ed25519")[:300], private("ed25519").replace(b"QyNTUx", b"QyNTUy")):
        with pytest.raises(CkptError) as refused:
            SigningKey.from_bytes(bad)
        error: BaseException | None = refused.value
        while error is not None:
            shown.append(repr(error))
            error = error.__cause__
    secret = private("ed25519").splitlines()
    assert not [text for text in shown for line in secret[1:-1] if line.decode() in text]
    for carry in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="stays in its process"):
            carry(key)  # type: ignore[operator]
