"""SSHSIG: the bytes of a signature by an SSH key (OpenSSH, PROTOCOL.sshsig), and the names of public keys.

    blob    magic, version, public key, namespace, reserved, hash algorithm, signature
    armor   the blob in base64 between two lines, as `ssh-keygen -Y sign` writes it

Invariant: `parse_signature` raises `MalformedSignature` or gives a signature whose `blob` is what was parsed.
Must not know: whether a signature is true.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from dataclasses import dataclass

MAGIC = b"SSHSIG"
VERSION = 1

NAMESPACE = "cas_ckpt"
"""What signatures of commits and tags are made for, so that one made for something else is none here."""

MAX_SIGNATURE_BYTES = 16 * 1024
"""No signature is longer: one of RSA with 16,384 bits has about 4,200 bytes."""

_BEGIN, _END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"
_ARMOR_COLUMNS = 70
_HASHES = {"sha256": hashlib.sha256, "sha512": hashlib.sha512}


class MalformedSignature(ValueError):
    """These bytes are no signature, or no public key; says why. Never leaves signing/."""


@dataclass(frozen=True, slots=True)
class Signature:
    """One signature as it was stored.

    Attributes:
        key: The public key in SSH's own bytes.
        key_type: What `key` says that it is, e.g. "ssh-ed25519".
        hash_name: Of the message: "sha256" or "sha512".
        algorithm: Of the signature itself, e.g. "rsa-sha2-512".
        value: What the algorithm made.
    """

    key: bytes
    key_type: str
    namespace: str
    hash_name: str
    algorithm: str
    value: bytes

    @property
    def blob(self) -> bytes:
        """The bytes that are stored."""
        inner = string(self.algorithm.encode()) + string(self.value)
        fields = (self.key, self.namespace.encode(), b"", self.hash_name.encode(), inner)
        return MAGIC + struct.pack(">I", VERSION) + b"".join(map(string, fields))

    @property
    def fingerprint(self) -> str:
        """The name of its key, as `ssh-keygen -l` prints it."""
        return fingerprint(self.key)


def string(data: bytes) -> bytes:
    """`data` as a string of SSH: its length before it."""
    return struct.pack(">I", len(data)) + data


class Strings:
    """Takes strings of SSH from the front of some bytes."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self) -> bytes:
        """The next string."""
        start = self._at + 4
        if start > len(self._data):
            raise MalformedSignature("it is cut short")
        (length,) = struct.unpack_from(">I", self._data, self._at)
        if length > len(self._data) - start:
            raise MalformedSignature("it is cut short")
        self._at = start + length
        return self._data[start : self._at]

    def text(self) -> str:
        """The next string, of printable ASCII."""
        data = self.take()
        if not data.isascii() or not data.decode("ascii").isprintable():
            raise MalformedSignature("a name in it is not plain text")
        return data.decode("ascii")

    def end(self) -> None:
        """Refuse what is left."""
        if self._at != len(self._data):
            raise MalformedSignature(f"{len(self._data) - self._at} bytes follow it")


def parse_signature(blob: bytes) -> Signature:
    """The signature in `blob`.

    Raises:
        MalformedSignature: it is none, or not one alone.
    """
    if len(blob) > MAX_SIGNATURE_BYTES:
        raise MalformedSignature(f"it has {len(blob)} bytes; no signature has more than {MAX_SIGNATURE_BYTES}")
    if blob[: len(MAGIC)] != MAGIC:
        raise MalformedSignature("it does not begin as an SSH signature does")
    head = len(MAGIC) + 4
    if len(blob) < head:
        raise MalformedSignature("it is cut short")
    (version,) = struct.unpack_from(">I", blob, len(MAGIC))
    if version != VERSION:
        raise MalformedSignature(f"it is of version {version}, this cas_ckpt knows version {VERSION}")
    fields = Strings(blob[head:])
    key, namespace, reserved, hash_name = fields.take(), fields.text(), fields.take(), fields.text()
    inner = Strings(fields.take())
    fields.end()
    algorithm, value = inner.text(), inner.take()
    inner.end()
    if reserved or hash_name not in _HASHES:
        raise MalformedSignature(f"it is of a form that is not known (hash {hash_name[:20]!r})")
    return Signature(key, key_type(key), namespace, hash_name, algorithm, value)


def signed_data(namespace: str, hash_name: str, message: bytes) -> bytes:
    """What a key signs in the place of `message`."""
    digest = _HASHES[hash_name](message).digest()
    return MAGIC + b"".join(map(string, (namespace.encode(), b"", hash_name.encode(), digest)))


def key_type(key: bytes) -> str:
    """What a public key says that it is.

    Raises:
        MalformedSignature: it is no public key.
    """
    try:
        return Strings(key).text()
    except MalformedSignature as error:
        raise MalformedSignature(f"no public key: {error}") from error


def fingerprint(key: bytes) -> str:
    """The name of a public key, as `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


def armored(blob: bytes) -> str:
    """`blob` as text, in the form of `ssh-keygen -Y sign`."""
    text = to_base64(blob)
    rows = [text[at : at + _ARMOR_COLUMNS] for at in range(0, len(text), _ARMOR_COLUMNS)]
    return "\n".join([_BEGIN, *rows, _END]) + "\n"


def to_base64(data: bytes) -> str:
    """`data` in base64, in one row."""
    return base64.b64encode(data).decode()


def from_base64(text: str) -> bytes:
    """The bytes that `text` is the base64 of.

    Raises:
        MalformedSignature: it is not base64.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MalformedSignature(f"it is not base64: {error}") from error
