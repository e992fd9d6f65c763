"""Signatures as git makes them with SSH keys: `ssh-keygen -Y` signs and verifies, and reads keys and allowed_signers.

    `sign`     `-Y sign`, data by stdin: a key file, a key of an ssh-agent, a security key
    `Trust`    whose signatures count: the lines of an allowed_signers file, and files of revoked keys
    `verdict`  `-Y find-principals` and `-Y verify`; of what these refuse, `-Y check-novalidate` says whether it fits

Stored is the blob of a signature (SSHSIG, OpenSSH's PROTOCOL.sshsig), not armored.

Invariant: a verdict is an answer, never an exception, whatever bytes it is asked about; "good" is said by ssh-keygen
alone. No private key is read here. Knows nothing of commits, tags and stores.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import struct
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from cas_ckpt.errors import InvalidInputError, StorageError, shown_value
from cas_ckpt.objects.nodes import MAX_SIGNATURE_BYTES

if TYPE_CHECKING:
    import subprocess

NAMESPACE = "cas_ckpt"
"""The namespace of signatures of commits and tags: one that was made for something else is none here."""

MAX_FILE_BYTES = 4 * 1024 * 1024

_HEAD = b"SSHSIG\0\0\0\1"
_BEGIN, _END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"
_ARMOR_COLUMNS = 70
_PUBLIC_KEY = re.compile(
    r"(?P<type>(?:sk-)?(?:ssh|ecdsa)-[\w.@-]+)[ \t]+(?P<key>AAAA[\w+/]+=*)(?:[ \t]+(?P<comment>.*))?"
)
_NO_LINE = re.compile("[\n\0\ud800-\udfff]")
_PLAIN_NAME = re.compile(r"(?!(?:sk-)?(?:ssh|ecdsa)-)[\w.@+-]+")
"""Comments of public keys that will do as the name of a signer."""


def _ssh_keygen(*words: str, data: bytes, folder: str | None = None) -> subprocess.CompletedProcess[bytes]:
    import subprocess  # late, as is tempfile: most of what imports this module runs nothing

    command = ["ssh-keygen", "-Y", *words]
    try:
        return subprocess.run(command, input=data, capture_output=True, cwd=folder, check=False)  # noqa: S603 - no shell
    except OSError as error:
        raise InvalidInputError(
            f"signatures need ssh-keygen of OpenSSH 8.8 or newer, which cannot be run ({error.strerror}): install "
            "openssh-client (Debian, Ubuntu), openssh-clients (Fedora) or openssh (Homebrew, conda)"
        ) from error


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    """Why it refused, in its own words."""
    lines = [line.strip(" \r") for line in done.stderr.decode(errors="replace").splitlines()]
    told = [line for line in lines if line and line[0] != "@" and line != "Signing data on standard input"]
    return "; ".join(line.rstrip(".") for line in told)[:500] or f"it ended with {done.returncode}"


# --- signing ----------------------------------------------------------------------------------


KeyFile: TypeAlias = str | PathLike[str]
"""The file of a key that signs: private, or public where an ssh-agent holds the private one."""


def key_path(given: KeyFile) -> str:
    """The absolute path of the key that `given` names; `~` is the home folder.

    Raises:
        InvalidInputError: no path. StorageError: there is no such file.
    """
    if not isinstance(given, (str, PathLike)):  # its value is not shown: it may be the key
        raise InvalidInputError(f"sign is a {type(given).__name__}: give the path of a private or public key of SSH")
    where = fspath(given)
    try:
        path = Path(where).expanduser().absolute()
        path.open("rb").close()
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StorageError(f"the signing key {shown_value(where)} cannot be read: {reason}") from error
    return str(path)


def sign(path: str, message: bytes) -> bytes:
    """The signature of `message` by the key in the file `path`, or by its agent, as it is stored.

    Raises:
        InvalidInputError: ssh-keygen does not sign with it, or is not installed; says why.
    """
    done = _ssh_keygen("sign", "-n", NAMESPACE, "-f", path, data=message)
    if done.returncode != 0:
        raise InvalidInputError(
            f"the key {path!r} does not sign: {_said(done)}. The passphrase of an encrypted key is asked for on the "
            "terminal; where there is none, add it to an ssh-agent (ssh-add)"
        )
    return base64.b64decode("".join(done.stdout.decode().split("\n")[1:-2]))


def armored(blob: bytes) -> str:
    """A signature as text, as `ssh-keygen -Y sign` writes it and `-Y verify` reads it."""
    text = base64.b64encode(blob).decode()
    rows = [text[at : at + _ARMOR_COLUMNS] for at in range(0, len(text), _ARMOR_COLUMNS)]
    return "\n".join([_BEGIN, *rows, _END]) + "\n"


# --- verdicts ---------------------------------------------------------------------------------


class Verdict(StrEnum):
    """A verdict on a signature."""

    GOOD = "good"
    UNSIGNED = "unsigned"
    BAD = "bad"
    UNTRUSTED = "untrusted"
    EXPIRED = "expired"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class SignatureInfo:
    """The verdict on one signature.

    Attributes:
        verdict: "good": by somebody who is trusted, and it fits. "unsigned": there is none. "bad": malformed, for
            something else, or it does not fit. "untrusted": it fits, by a key of nobody who is trusted for this.
            "expired": the key was not valid at the time that was signed. "revoked": the key is.
        signers: Whose key it is, as the file of trust names them.
        key_type, fingerprint: Of the key; empty if there is none.
        reason: Why it is not good, in words.
    """

    verdict: Verdict
    signers: tuple[str, ...] = ()
    key_type: str = ""
    fingerprint: str = ""
    reason: str = ""

    @property
    def is_good(self) -> bool:
        """Whether somebody trusted signed this."""
        return self.verdict is Verdict.GOOD


UNSIGNED = SignatureInfo(Verdict.UNSIGNED, reason="it is not signed")


def described(blob: bytes | None) -> SignatureInfo:
    """The key that a signature claims to be by, unverified. Runs nothing."""
    if blob is None:
        return UNSIGNED
    key = _string(blob, len(_HEAD)) if blob.startswith(_HEAD) and len(blob) <= MAX_SIGNATURE_BYTES else None
    kind = None if key is None else _string(key, 0)
    if key is None or kind is None or not kind.decode("latin-1").isprintable():
        return SignatureInfo(Verdict.BAD, reason="malformed: it does not begin as a signature of SSH does")
    return SignatureInfo(Verdict.UNTRUSTED, (), kind.decode("latin-1"), _fingerprint(key), "not verified")


def _string(data: bytes, at: int) -> bytes | None:
    """The string of SSH, its length before it, that begins there; None: it is cut short."""
    if len(data) < at + 4:
        return None
    end = at + 4 + struct.unpack_from(">I", data, at)[0]
    return data[at + 4 : end] if end <= len(data) else None


def _fingerprint(key: bytes) -> str:
    """The name of a public key, as `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


@dataclass(frozen=True, slots=True)
class Trust:
    """Keys whose signatures count; made by `Trust.load` or `as_trust`.

    Attributes:
        signers: Lines of an allowed_signers file; see ssh-keygen(1).
        revoked: Files of keys that count no more, whatever else says: public keys, or a KRL.
    """

    signers: tuple[str, ...] = ()
    revoked: tuple[bytes, ...] = ()

    @classmethod
    def load(cls, path: str | PathLike[str], *, revoked: str | PathLike[str] | None = None) -> Trust:
        """The keys in an allowed_signers file, or in a file of public keys, but for those in a file of revoked keys.

        Raises:
            InvalidInputError: a line without a key; names it. StorageError: a file cannot be read.
        """
        try:
            text = _read(path).decode()
        except UnicodeDecodeError as error:
            raise InvalidInputError(f"{fspath(path)!r} is no file of trusted keys: {error}") from error
        trust = cls(parse_signers(text.split("\n"), name=repr(fspath(path))))
        return trust if revoked is None else trust.without(revoked)

    def without(self, path: str | PathLike[str]) -> Trust:
        """The same, but for the keys in the file `path`; errors as for `load`."""
        return replace(self, revoked=(*self.revoked, _read(path)))

    def verdict(self, blob: bytes | None, message: bytes, *, time_s: float) -> SignatureInfo:
        """The verdict on the signature `blob` of `message`.

        Args:
            time_s: When it says that it was made, from the epoch; a part of `message`.
        Raises:
            InvalidInputError: ssh-keygen is not installed. StorageError: there is no room for temporary files.
        """
        import tempfile

        claimed = described(blob)
        if blob is None or claimed.verdict is Verdict.BAD:
            return claimed
        try:
            with tempfile.TemporaryDirectory(prefix="cas_ckpt_verify_") as folder:
                return self._verified(folder, claimed, blob, message, time_s)
        except OSError as error:
            raise StorageError(f"a signature cannot be verified in {tempfile.gettempdir()}: {error}") from error

    def _verified(
        self, folder: str, claimed: SignatureInfo, blob: bytes, message: bytes, time_s: float
    ) -> SignatureInfo:
        Path(folder, "signature").write_text(armored(blob))
        try:  # in local time, as OpenSSH before 9.1 takes no other
            moment = f"-Overify-time={datetime.fromtimestamp(time_s):%Y%m%d%H%M%S}"
        except (OverflowError, ValueError, OSError):
            moment = "-Overify-time=none"  # which no key is valid at
        files = ("-f", "allowed_signers", "-s", "signature", moment)
        said = []
        own = [line for line in self.signers if _key_of(line) == claimed.fingerprint]
        # find-principals stops at the first line of a key, which may not be the one that fits: then each is asked
        for lines in (self.signers, *([line] for line in own if len(own) > 1)):
            Path(folder, "allowed_signers").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            done = _ssh_keygen("find-principals", *files, data=b"", folder=folder)
            named = done.stdout.decode(errors="replace").splitlines() if done.returncode == 0 else []
            for name in named:
                whole = ("verify", "-n", NAMESPACE, "-I", name, *files)
                done = _ssh_keygen(*whole, data=message, folder=folder)
                if done.returncode == 0:
                    for revoked in self.revoked:
                        Path(folder, "revoked").write_bytes(revoked)
                        if _ssh_keygen(*whole, "-r", "revoked", data=message, folder=folder).returncode != 0:
                            return replace(claimed, verdict=Verdict.REVOKED, reason="its key is revoked")
                    return replace(claimed, verdict=Verdict.GOOD, signers=tuple(named), reason="")
            said.append(_said(done))
        fits = _ssh_keygen("check-novalidate", "-n", NAMESPACE, "-s", "signature", data=message, folder=folder)
        if fits.returncode != 0:
            return replace(claimed, verdict=Verdict.BAD, reason=_said(fits))
        late = [each for each in said if "key has expired" in each or "key is not yet valid" in each]
        reason, is_late = (late or said)[0], bool(late)
        if reason == "No principal matched":
            reason = "its key is of nobody who is trusted"
        return replace(claimed, verdict=Verdict.EXPIRED if is_late else Verdict.UNTRUSTED, reason=reason)


def _key_of(line: str) -> str:
    """The fingerprint of the key in a line of trust; empty if it is malformed."""
    key = _PUBLIC_KEY.search(line)
    try:
        return "" if key is None else _fingerprint(base64.b64decode(key["key"], validate=True))
    except (binascii.Error, ValueError):
        return ""


# --- what is trusted --------------------------------------------------------------------------


Trusted: TypeAlias = str | PathLike[str] | Sequence[str] | Trust
"""Whose signatures count: a file of allowed signers or public keys, a public key, several, or a `Trust`."""


def as_trust(given: Trusted) -> Trust:
    """`given` as trust: a `Trust`, the path of an allowed_signers or .pub file, a public key, or lines of such a file.

    Raises:
        InvalidInputError: none of these. StorageError: the file cannot be read.
    """
    if isinstance(given, Trust):
        return given
    if isinstance(given, str) and _PUBLIC_KEY.match(given):
        return Trust(parse_signers([given]))
    if isinstance(given, (str, PathLike)):
        return Trust.load(given)
    if not isinstance(given, (Sequence, Set)) or isinstance(given, (bytes, bytearray)):
        raise InvalidInputError(f"trust is {shown_value(given)}: give a path of allowed signers, or public keys")
    for line in given:
        if not isinstance(line, str):
            raise InvalidInputError(f"trust holds {shown_value(line)}: give lines of allowed signers, or public keys")
    return Trust(parse_signers(list(given)))


def _read(path: str | PathLike[str]) -> bytes:
    where = fspath(path)
    try:
        with Path(where).expanduser().open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StorageError(f"the file of keys {where!r} cannot be read: {reason}") from error
    if len(data) > MAX_FILE_BYTES:
        raise InvalidInputError(f"{where!r} is longer than {MAX_FILE_BYTES} bytes: that is no file of keys")
    return data


def parse_signers(lines: Sequence[str], *, name: str = "trust") -> tuple[str, ...]:
    """The lines of an allowed_signers file that hold a key; a line of a .pub file becomes one, named by its comment.

    What else a line says is for ssh-keygen to read: it takes no signature by a line that it does not understand.

    Args:
        name: What errors call it.
    Raises:
        InvalidInputError: a line that holds no key; or there is none at all.
    """
    found = []
    for number, line in enumerate(lines, 1):
        text = line.strip(" \t\r\n")
        is_one = _NO_LINE.search(text) is None
        if is_one and (not text or text.startswith("#")):
            continue
        key = _PUBLIC_KEY.search(text)
        if key is None or not is_one:
            raise InvalidInputError(f"{name}, line {number}: wanted a line such as 'ann@lab.org ssh-ed25519 AAAA...'")
        found.append(text if key.start() else f"{_named(key, name, number)} {key['type']} {key['key']}")
    if not found:
        raise InvalidInputError(f"{name} holds no key: write lines such as 'ann@lab.org ssh-ed25519 AAAA...'")
    return tuple(found)


def _named(key: re.Match[str], name: str, number: int) -> str:
    comment = key["comment"] or ""
    try:
        return comment if _PLAIN_NAME.fullmatch(comment) else _fingerprint(base64.b64decode(key["key"], validate=True))
    except (binascii.Error, ValueError) as error:
        raise InvalidInputError(f"{name}, line {number}: the key is not base64: {error}") from error
