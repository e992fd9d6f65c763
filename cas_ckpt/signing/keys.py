"""Keys: private ones that sign commits and tags, public ones that verify them. This file alone imports cryptography.

Private keys are read from files of OpenSSH (`ssh-keygen`) and of PEM (`openssl genpkey`): Ed25519, ECDSA and RSA.
Invariant: what is secret of a key is in no repr, error or pickle, and leaves the object that holds it only by signing.
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cas_ckpt.errors import InvalidInputError, StorageError
from cas_ckpt.signing.sshsig import (
    NAMESPACE,
    MalformedSignature,
    Signature,
    Strings,
    fingerprint,
    from_base64,
    key_type,
    signed_data,
    string,
    to_base64,
)

if TYPE_CHECKING:
    from types import ModuleType

    from cryptography.hazmat.primitives.hashes import HashAlgorithm

MAX_KEY_FILE_BYTES = 64 * 1024
MIN_RSA_BITS = 2048
MAX_RSA_BITS = 16384

ED25519 = "ssh-ed25519"
RSA = "ssh-rsa"
_ECDSA = {"ecdsa-sha2-nistp256": "SHA256", "ecdsa-sha2-nistp384": "SHA384", "ecdsa-sha2-nistp521": "SHA512"}
"""Type of key (and algorithm of its signatures) -> hash that the signature is made of."""

_RSA_HASHES = {"rsa-sha2-512": "SHA512", "rsa-sha2-256": "SHA256"}
KEY_TYPES = frozenset({ED25519, RSA, *_ECDSA})
"""Types of public keys that are verified."""

_SIGNED_HASH = "sha512"
_ED25519_BYTES = 32
_MPINT_BYTES = 67
"""Of the longest number in a signature of ECDSA: 521 bits, and one for the sign."""

Passphrase = str | bytes | Callable[[], str | bytes] | None
"""What opens an encrypted private key, or what asks for it when it turns out to be needed."""


def _cryptography() -> ModuleType:
    """The part of cryptography that reads keys; what else is needed is imported where it is used."""
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError as error:
        raise InvalidInputError(
            f"signatures need the package cryptography ({error}): pip install 'cas-ckpt[sign]'"
        ) from error
    return serialization


# --- public keys ------------------------------------------------------------------------------


def verify_signature(signature: Signature, message: bytes) -> None:
    """See that `signature` is its key's signature of `message`.

    Raises:
        MalformedSignature: it is not, or nobody here can tell; says why.
        InvalidInputError: cryptography is not installed.
    """
    _check_key_type(signature.key_type)
    serialization = _cryptography()
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

    data = signed_data(signature.namespace, signature.hash_name, message)
    key: Any = _load_public(serialization, signature.key)
    try:
        if isinstance(key, ed25519.Ed25519PublicKey) and signature.algorithm == ED25519:
            key.verify(signature.value, data)
        elif isinstance(key, rsa.RSAPublicKey) and signature.algorithm in _RSA_HASHES:
            _check_rsa(key.key_size)
            key.verify(signature.value, data, padding.PKCS1v15(), _hash(_RSA_HASHES[signature.algorithm]))
        elif isinstance(key, ec.EllipticCurvePublicKey) and signature.algorithm == signature.key_type:
            key.verify(_der_of_ecdsa(signature.value), data, ec.ECDSA(_hash(_ECDSA[signature.algorithm])))
        else:
            raise MalformedSignature(
                f"a key of type {signature.key_type} makes no signature of {signature.algorithm[:40]!r}"
            )
    except InvalidSignature as error:
        raise MalformedSignature("it is not a signature of these bytes by this key") from error
    except (ValueError, TypeError, OverflowError, UnsupportedAlgorithm) as error:
        if isinstance(error, MalformedSignature):
            raise
        raise MalformedSignature(f"cryptography refuses it: {error}") from error


def _check_key_type(kind: str) -> None:
    if kind not in KEY_TYPES:
        raise MalformedSignature(
            f"keys of type {kind[:60]!r} are not verified here: use one of {', '.join(sorted(KEY_TYPES))}"
        )


def _load_public(serialization: ModuleType, blob: bytes) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return serialization.load_ssh_public_key(f"{key_type(blob)} {to_base64(blob)}".encode())
    except (ValueError, TypeError, OverflowError, UnsupportedAlgorithm) as error:
        raise MalformedSignature(f"its public key is none: {error}") from error


def _check_rsa(bits: int) -> None:
    if not MIN_RSA_BITS <= bits <= MAX_RSA_BITS:
        raise MalformedSignature(f"a key of RSA has {MIN_RSA_BITS} to {MAX_RSA_BITS} bits, this one {bits}")


def _hash(name: str) -> HashAlgorithm:
    from cryptography.hazmat.primitives import hashes

    made: HashAlgorithm = getattr(hashes, name)()
    return made


def _der_of_ecdsa(value: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

    numbers = Strings(value)
    first, second = numbers.take(), numbers.take()
    numbers.end()
    if max(len(first), len(second)) > _MPINT_BYTES:
        raise MalformedSignature("its numbers are too long")
    return encode_dss_signature(int.from_bytes(first, "big", signed=True), int.from_bytes(second, "big", signed=True))


def public_key_of_line(line: str) -> tuple[bytes, str]:
    """The public key, and the comment behind it, of a line as in a .pub file: type, base64, comment.

    Raises:
        MalformedSignature: no such line.
    """
    words = line.split(None, 2)
    if len(words) < 2:
        raise MalformedSignature("wanted the type of a key and its base64")
    blob = from_base64(words[1])
    if key_type(blob) != words[0]:
        raise MalformedSignature(f"the key is of type {key_type(blob)[:60]!r}, the line says {words[0][:60]!r}")
    _check_shape(blob)
    return blob, words[2].strip() if len(words) == 3 else ""


def _check_shape(blob: bytes) -> None:
    """Refuse a public key that was cut short, or has something behind it: it would never match, and nobody be told."""
    fields = Strings(blob)
    kind = fields.text()
    if kind in KEY_TYPES:
        first = fields.take()
        if kind != ED25519:
            fields.take()
        elif len(first) != _ED25519_BYTES:
            raise MalformedSignature(f"a public key of Ed25519 has {_ED25519_BYTES} bytes, this one {len(first)}")
        fields.end()


# --- private keys -----------------------------------------------------------------------------


class SigningKey:
    """A private key that signs commits and tags.

        key = SigningKey.load("~/.ssh/id_ed25519", passphrase=getpass.getpass)
        repo.commit(state, sign=key)

    It stays in this process: it is not shown, cannot be pickled or copied, and no other rank is sent it.
    """

    __slots__ = ("_key", "public_key")

    def __init__(self, key: Any) -> None:
        """Take over a private key of the package cryptography.

        Raises:
            InvalidInputError: no private key of Ed25519, ECDSA (nistp256, 384, 521) or RSA (2,048 bits and more).
        """
        self._key = key
        self.public_key = _public_blob(key)
        """The public key, in SSH's own bytes."""

    @classmethod
    def load(cls, path: str | PathLike[str], *, passphrase: Passphrase = None) -> SigningKey:
        """The key in the file `path`, of OpenSSH or PEM; `~` is the home folder.

        Args:
            passphrase: Of an encrypted key; what is called gives it when it turns out to be needed.
        Raises:
            InvalidInputError: no such key; it is encrypted and the passphrase is missing or wrong.
            StorageError: the file cannot be read.
        """
        where = fspath(path)
        try:
            with Path(where).expanduser().open("rb") as file:
                data = file.read(MAX_KEY_FILE_BYTES + 1)
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise StorageError(f"the signing key {where!r} cannot be read: {reason}") from error
        return cls.from_bytes(data, passphrase=passphrase, name=repr(where))

    @classmethod
    def from_bytes(cls, data: bytes, *, passphrase: Passphrase = None, name: str = "the signing key") -> SigningKey:
        """The key in the content of such a file, e.g. from a store of secrets; errors as for `load`.

        Args:
            name: What errors call it.
        """
        serialization = _cryptography()
        if len(data) > MAX_KEY_FILE_BYTES or b"-----BEGIN " not in data[:200]:
            hint = " (that is a public key: name the file without .pub)" if _is_public(data) else ""
            raise InvalidInputError(f"{name} is no private key of OpenSSH or PEM{hint}")
        is_ssh = data.lstrip().startswith(b"-----BEGIN OPENSSH")
        read = serialization.load_ssh_private_key if is_ssh else serialization.load_pem_private_key
        key, encrypted = _opened(read, data, None, name)
        if encrypted:
            given = passphrase() if callable(passphrase) else passphrase
            if not given:
                raise InvalidInputError(f"{name} is encrypted: give its passphrase, SigningKey.load(path, passphrase=)")
            key, encrypted = _opened(read, data, given.encode() if isinstance(given, str) else given, name)
            if encrypted:
                raise InvalidInputError(f"{name} is encrypted, and the passphrase does not open it")
        return cls(key)

    @classmethod
    def generate(cls) -> SigningKey:
        """A new key of Ed25519, in this process alone: for tests, and for jobs that publish their public key."""
        _cryptography()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.generate())

    @property
    def fingerprint(self) -> str:
        """The name of the key, as `ssh-keygen -l` prints it."""
        return fingerprint(self.public_key)

    @property
    def public_line(self) -> str:
        """The public key as a line of a .pub file, without a comment."""
        return f"{key_type(self.public_key)} {to_base64(self.public_key)}"

    def sign(self, message: bytes, *, namespace: str = NAMESPACE) -> bytes:
        """The signature of `message`, as bytes (SSHSIG)."""
        from cryptography.hazmat.primitives.asymmetric import padding

        kind = key_type(self.public_key)
        data = signed_data(namespace, _SIGNED_HASH, message)
        if kind == ED25519:
            algorithm, value = kind, self._key.sign(data)
        elif kind == RSA:
            algorithm = "rsa-sha2-512"
            value = self._key.sign(data, padding.PKCS1v15(), _hash("SHA512"))
        else:
            algorithm, value = kind, self._sign_ecdsa(data, _ECDSA[kind])
        return Signature(self.public_key, kind, namespace, _SIGNED_HASH, algorithm, value).blob

    def _sign_ecdsa(self, data: bytes, hash_name: str) -> bytes:
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

        numbers = decode_dss_signature(self._key.sign(data, ec.ECDSA(_hash(hash_name))))
        return b"".join(string(number.to_bytes(number.bit_length() // 8 + 1, "big")) for number in numbers)

    def __repr__(self) -> str:
        return f"SigningKey({self.fingerprint})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a signing key stays in its process: it is neither pickled nor copied")


def signing_key(given: Any) -> SigningKey:
    """`given` as a key: a `SigningKey`, a path of a key that is not encrypted, or a private key of cryptography.

    Raises:
        InvalidInputError: none of these. StorageError: the file cannot be read.
    """
    if isinstance(given, SigningKey):
        return given
    if isinstance(given, (str, PathLike)):
        return SigningKey.load(given)
    if isinstance(given, (bytes, bytearray)):  # its value is not shown: it may be the key
        raise InvalidInputError("sign is bytes: give a path or a SigningKey; SigningKey.from_bytes makes one of bytes")
    return SigningKey(given)


def _opened(read: Callable[..., Any], data: bytes, password: bytes | None, name: str) -> tuple[Any, bool]:
    """The private key, or None; and whether a (or another) passphrase is needed."""
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return read(data, password), False
    except TypeError as error:  # of cryptography: encrypted without a password, or the other way round
        if password is None:
            return None, True
        raise InvalidInputError(f"{name} cannot be opened: it is not encrypted") from error
    except UnsupportedAlgorithm as error:
        raise InvalidInputError(
            f"{name}: cryptography cannot read it ({error}); pip install 'cas-ckpt[sign]'"
        ) from error
    except ValueError as error:
        if password is not None:
            return None, True
        # Not chained, and not quoted: what a parser says of a private key may show a part of it.
        raise InvalidInputError(f"{name} is damaged, or a kind of private key that is not known here") from (
            None if error else error
        )


def _is_public(data: bytes) -> bool:
    return data.lstrip()[:40].startswith((b"ssh-", b"ecdsa-", b"sk-"))


def _public_blob(key: Any) -> bytes:
    serialization = _cryptography()
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    if not isinstance(key, (ed25519.Ed25519PrivateKey, rsa.RSAPrivateKey, ec.EllipticCurvePrivateKey)):
        kind = type(key).__name__
        raise InvalidInputError(
            f"sign is a {kind}: give a path, a SigningKey, or a private key of Ed25519, ECDSA or RSA; keys in an "
            "ssh-agent and on security keys are not used"
        )
    try:
        line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        blob, _ = public_key_of_line(line.decode())
        if isinstance(key, rsa.RSAPrivateKey):
            _check_rsa(key.key_size)
    except ValueError as error:
        raise InvalidInputError(f"this private key cannot be used here: {error}") from error
    return blob
