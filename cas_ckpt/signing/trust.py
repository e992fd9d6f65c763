"""Whose signatures count: allowed_signers files as OpenSSH and git use them, and the verdict on a signature.

    principals [options] type base64 [comment]
    ann@lab.org,bob@lab.org namespaces="git,cas_ckpt",valid-before="20270101" ssh-ed25519 AAAA... ann's laptop

Options: namespaces="...", valid-after="...", valid-before="..."; lines of cert-authority are read and never match, as
certificates are not verified. A line of a .pub file is taken for a key of whoever its comment names.

Invariant: what is not understood in a file of trust is an error, never passed over; what is not understood in a
signature makes it a bad one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from cas_ckpt.errors import InvalidInputError, StorageError, shown_value
from cas_ckpt.signing.keys import KEY_TYPES, public_key_of_line, verify_signature
from cas_ckpt.signing.sshsig import NAMESPACE, MalformedSignature, fingerprint, key_type, parse_signature, to_base64

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_LINES = 10_000
_KRL = b"SSHKRL\n"
_TIME = re.compile(r"(\d{8})(?:(\d{4})(\d{2})?)?(Z?)\Z")
_OPTION = re.compile(r'(?P<name>[A-Za-z-]+)(?:="(?P<value>(?:[^"\\]|\\.)*)")?(?:,|\Z)')
_PLAIN_NAME = re.compile(r"[^\s#'\"][^\s'\"]*\Z")
"""Principals that need no quotes; but a name such as ssh-key-1 would be taken for the type of a key."""

_KEY_WORD = re.compile(r"(?:ssh|ecdsa|sk-ssh|sk-ecdsa)-[A-Za-z0-9@.-]+\Z")


class Verdict(StrEnum):
    """What is known of a signature."""

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
            something else, or it does not fit. "untrusted": it fits, by a key of nobody who is trusted.
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


@dataclass(frozen=True, slots=True)
class Signer:
    """One line of a file of trust.

    Attributes:
        key: The public key, in SSH's own bytes.
        principals: Whose it is, as the line says.
        namespaces: Patterns of what it may sign; None: anything.
        valid_after_s, valid_before_s: The first and last second, from the epoch, at which it may have signed.
        is_authority: It signs certificates, not commits.
    """

    key: bytes
    principals: str
    namespaces: str | None = None
    valid_after_s: float | None = None
    valid_before_s: float | None = None
    is_authority: bool = False

    @property
    def fingerprint(self) -> str:
        """The name of the key, as `ssh-keygen -l` prints it."""
        return fingerprint(self.key)

    @property
    def line(self) -> str:
        """As a line of an allowed_signers file; whatever else the key was given for stays out of it."""
        name = self.principals.replace('"', "'").replace("\t", " ")
        is_plain = _PLAIN_NAME.match(name) is not None and _KEY_WORD.match(name) is None
        times = {"valid-after": self.valid_after_s, "valid-before": self.valid_before_s}
        options = ["cert-authority"] if self.is_authority else []
        options += [] if self.namespaces is None else [f'namespaces="{self.namespaces}"']
        options += [f'{option}="{_stamp(time_s)}"' for option, time_s in times.items() if time_s is not None]
        words = [name if is_plain else f'"{name}"', ",".join(options), key_type(self.key), to_base64(self.key)]
        return " ".join(word for word in words if word)

    def rejection(self) -> str:
        """Why no signature by this key counts, at any time; "" if it does."""
        if self.is_authority:
            return "its line is of a cert-authority, and certificates are not verified here"
        if self.namespaces is not None and not matches_list(NAMESPACE, self.namespaces):
            return f"its line allows namespaces {self.namespaces!r}, not {NAMESPACE!r}"
        return ""

    def when_not(self, time_s: float) -> str:
        """Why the key was not valid at this time; "" if it was."""
        if self.valid_after_s is not None and time_s < self.valid_after_s:
            return f"the key is valid from {_utc(self.valid_after_s)} on"
        if self.valid_before_s is not None and time_s > self.valid_before_s:
            return f"the key was valid until {_utc(self.valid_before_s)}"
        return ""


@dataclass(frozen=True, slots=True)
class Trust:
    """Whose signatures count; made by `Trust.load` or `as_trust`.

    Attributes:
        signers: The lines of keys.
        revoked: Public keys that count no more, whatever else says.
    """

    signers: tuple[Signer, ...] = ()
    revoked: frozenset[bytes] = frozenset()

    @classmethod
    def load(cls, path: str | PathLike[str], *, revoked: str | PathLike[str] | None = None) -> Trust:
        """The keys in an allowed_signers file, but for those in a file of revoked keys (one public key a line).

        Raises:
            InvalidInputError: a line that is not understood; names it. StorageError: a file cannot be read.
        """
        lines, name = _read_lines(path)
        trust = cls(parse_signers(lines, name=name))
        return trust if revoked is None else trust.without(revoked)

    def without(self, path: str | PathLike[str]) -> Trust:
        """The same, but for the public keys in the file `path`, one a line; errors as for `load`."""
        lines, name = _read_lines(path)
        keys = {signer.key for signer in parse_signers(lines, name=name, bare=True)}
        return Trust(self.signers, self.revoked | keys)

    def verdict(self, blob: bytes | None, message: bytes, *, time_s: float) -> SignatureInfo:
        """What is known of the signature `blob` of `message`.

        Args:
            time_s: When it says that it was made, from the epoch; a part of `message`.
        Raises:
            InvalidInputError: cryptography is not installed.
        """
        if blob is None:
            return self.verdict_on_key(None, time_s=time_s)
        try:
            signature = parse_signature(blob)
        except MalformedSignature as error:
            return SignatureInfo(Verdict.BAD, reason=f"malformed: {error}")
        try:
            if signature.namespace != NAMESPACE:
                raise MalformedSignature(f"it was made for {signature.namespace[:60]!r}, not for {NAMESPACE!r}")
            verify_signature(signature, message)
        except MalformedSignature as error:
            return _info(Verdict.BAD, signature.key, str(error))
        return self.verdict_on_key(signature.key, time_s=time_s)

    def verdict_on_key(self, key: bytes | None, *, time_s: float) -> SignatureInfo:
        """What a signature by this public key is worth if it fits, made at this time; None: there is none."""
        if key is None:
            return SignatureInfo(Verdict.UNSIGNED, reason="it is not signed")
        if key in self.revoked:
            return _info(Verdict.REVOKED, key, "its key is revoked")
        own = [signer for signer in self.signers if signer.key == key]
        reasons = [signer.rejection() for signer in own]
        meant = [signer for signer, reason in zip(own, reasons, strict=True) if not reason]
        if not meant:
            reason = reasons[0] if reasons else "its key is of nobody who is trusted"
            return _info(Verdict.UNTRUSTED, key, reason)
        times = [signer.when_not(time_s) for signer in meant]
        valid = [signer for signer, reason in zip(meant, times, strict=True) if not reason]
        named = tuple(dict.fromkeys(signer.principals for signer in valid or meant))
        if not valid:
            return _info(Verdict.EXPIRED, key, f"{times[0]}; this was signed {_utc(time_s)}", named)
        return _info(Verdict.GOOD, key, "", named)


def _info(verdict: Verdict, key: bytes, reason: str, signers: tuple[str, ...] = ()) -> SignatureInfo:
    return SignatureInfo(verdict, signers, key_type(key), fingerprint(key), reason)


def described(blob: bytes | None) -> SignatureInfo | None:
    """Whose key a signature claims to be by, unverified; None without a signature. Needs no cryptography."""
    if blob is None:
        return None
    try:
        return _info(Verdict.UNTRUSTED, parse_signature(blob).key, "not verified")
    except MalformedSignature as error:
        return SignatureInfo(Verdict.BAD, reason=f"malformed: {error}")


def _utc(time_s: float) -> str:
    try:
        return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return f"{time_s:.0f} s after 1970"


def _stamp(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):%Y%m%d%H%M%SZ}"


# --- what is trusted --------------------------------------------------------------------------


def as_trust(given: Any) -> Trust:
    """`given` as trust: a `Trust`, the path of an allowed_signers or .pub file, one line of such a file, or several.

    Raises:
        InvalidInputError: none of these. StorageError: the file cannot be read.
    """
    if isinstance(given, Trust):
        return given
    if isinstance(given, str) and _KEY_WORD.match(given.split(" ", 1)[0]):
        return Trust(parse_signers([given]))
    if isinstance(given, (str, PathLike)):
        return Trust.load(given)
    if not isinstance(given, (Sequence, Set)) or isinstance(given, (bytes, bytearray)):
        raise InvalidInputError(f"trust is {shown_value(given)}: give a path of allowed signers, or public keys")
    lines = list(given)
    for line in lines:
        if not isinstance(line, str):
            raise InvalidInputError(f"trust holds {shown_value(line)}: give lines of allowed signers, or public keys")
    return Trust(parse_signers(lines))


def _read_lines(path: str | PathLike[str]) -> tuple[list[str], str]:
    where = fspath(path)
    try:
        with Path(where).expanduser().open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StorageError(f"the file of trusted keys {where!r} cannot be read: {reason}") from error
    if data.startswith(_KRL):
        raise InvalidInputError(f"{where!r} is a binary list of revoked keys (KRL): give a file of public keys instead")
    if len(data) > MAX_FILE_BYTES:
        raise InvalidInputError(f"{where!r} is longer than {MAX_FILE_BYTES} bytes: that is no file of trusted keys")
    try:
        return data.decode().splitlines(), repr(where)
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{where!r} is no file of trusted keys: {error}") from error


def parse_signers(lines: Sequence[str], *, name: str = "trust", bare: bool = False) -> tuple[Signer, ...]:
    """The signers in the lines of an allowed_signers file, or of public keys alone.

    Args:
        name: What errors call it.
        bare: Take public keys alone.
    Raises:
        InvalidInputError: a line that is not understood; or there is no key at all.
    """
    if len(lines) > MAX_LINES:
        raise InvalidInputError(f"{name} has {len(lines)} lines; at most {MAX_LINES} are read")
    found = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not text.startswith("#"):
            try:
                found.append(_parse_line(text, bare=bare))
            except MalformedSignature as error:
                raise InvalidInputError(f"{name}, line {number}: {error}") from error
    if not found and not bare:
        raise InvalidInputError(f"{name} holds no key: write lines such as 'ann@lab.org ssh-ed25519 AAAA...'")
    return tuple(found)


def _parse_line(line: str, *, bare: bool) -> Signer:
    if not line.replace("\t", " ").isprintable():
        raise MalformedSignature("it holds control characters")
    if _KEY_WORD.match(line.split(None, 1)[0]):
        key, comment = _public_key(line)
        return Signer(key, comment or fingerprint(key))
    if bare:
        raise MalformedSignature("wanted a public key: its type and its base64")
    principals, rest = _first_word(line)
    options, rest = _split_options(rest)
    key, _ = _public_key(rest)
    return _with_options(Signer(key, principals), options)


def _public_key(line: str) -> tuple[bytes, str]:
    key, comment = public_key_of_line(line)
    if line.split(None, 1)[0] not in KEY_TYPES:
        raise MalformedSignature(
            f"keys of type {line.split(None, 1)[0][:60]!r} are not verified here: use {', '.join(sorted(KEY_TYPES))}"
        )
    return key, comment


def _first_word(line: str) -> tuple[str, str]:
    """The principals, which may be in quotes, and the rest."""
    if line.startswith('"'):
        word, quote, rest = line[1:].partition('"')
        if not quote:
            raise MalformedSignature("the quotes of its principals are not closed")
    else:
        word, _, rest = line.replace("\t", " ").partition(" ")
    if not word or not rest.strip():
        raise MalformedSignature("wanted: principals, options if any, the type of a key, its base64")
    return word, rest.strip()


def _split_options(rest: str) -> tuple[str, str]:
    """Options, if there are any, and what follows."""
    if _KEY_WORD.match(rest.split(None, 1)[0]):
        return "", rest
    in_quotes, at = False, 0
    while at < len(rest) and (in_quotes or not rest[at].isspace()):
        if rest[at] == "\\" and in_quotes:
            at += 1
        elif rest[at] == '"':
            in_quotes = not in_quotes
        at += 1
    if in_quotes or at >= len(rest):
        raise MalformedSignature("wanted: principals, options if any, the type of a key, its base64")
    return rest[:at], rest[at:].strip()


def _with_options(signer: Signer, options: str) -> Signer:
    found: dict[str, str | None] = {}
    at = 0
    while at < len(options):
        match = _OPTION.match(options, at)
        if match is None:
            raise MalformedSignature(f"options {options[:80]!r} are not understood")
        name = match["name"].lower()
        if name in found:
            raise MalformedSignature(f"the option {name} is there twice")
        found[name] = match["value"]
        at = match.end()
    known = {"cert-authority": False, "namespaces": True, "valid-after": True, "valid-before": True}
    for name, value in found.items():
        if name not in known or known[name] is (value is None):
            raise MalformedSignature(f"the option {name[:40]!r} is not understood")
    after, before = _time(found.get("valid-after")), _time(found.get("valid-before"))
    if after is not None and before is not None and after >= before:
        raise MalformedSignature("its valid-after is not before its valid-before")
    namespaces = found.get("namespaces")
    return Signer(signer.key, signer.principals, namespaces, after, before, "cert-authority" in found)


def _time(text: str | None) -> float | None:
    """Seconds from the epoch: YYYYMMDD[HHMM[SS]], in local time, or with Z behind it in UTC."""
    if text is None:
        return None
    match = _TIME.match(text)
    if match is None:
        raise MalformedSignature(
            f"{text[:40]!r} is no time: write YYYYMMDD or YYYYMMDDHHMMSS, with Z behind it for UTC"
        )
    day, minutes, seconds, zone = match.groups()
    try:
        moment = datetime.strptime(f"{day}{minutes or '0000'}{seconds or '00'}", "%Y%m%d%H%M%S")
        return (moment.replace(tzinfo=UTC) if zone else moment).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise MalformedSignature(f"{text[:40]!r} is no time: {error}") from error


def matches_list(text: str, patterns: str) -> bool:
    """Whether `text` matches a list of patterns as of OpenSSH: commas, `*`, `?`, and `!` before one that must not."""
    found = False
    for pattern in patterns.split(","):
        wanted = pattern.strip()
        negated = wanted.startswith("!")
        if _matches(text, wanted[negated:]):
            if negated:
                return False
            found = True
    return found


def _matches(text: str, pattern: str) -> bool:
    """Whether a pattern of `*` and `?` matches; in time that a hostile pattern cannot blow up."""
    reached = {0}
    for sign in pattern:
        if sign == "*":
            reached = set(range(min(reached), len(text) + 1))
        else:
            reached = {at + 1 for at in reached if at < len(text) and sign in ("?", text[at])}
        if not reached:
            return False
    return len(text) in reached
