"""Refs: mutable names of commits, each one sealed record that is swapped, never edited (ref_store.py does it).

Invariant: every record carries a nonce, so that two equal-looking values are never confused.
"""

from __future__ import annotations

import os
import pwd
import re
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import starmap
from typing import Any

from cas_ckpt import clock
from cas_ckpt.errors import CorruptionError, InvalidInputError, shown_value
from cas_ckpt.objects.digest import DIGEST_BYTES, Digest, pack_canonical, seal, unseal
from cas_ckpt.objects.pack import NAME_BYTES

VERSION = 1
MAX_NAME_BYTES = 200
MAX_LOG = 64
"""Moves that a ref's own record remembers (those that parents of commits do not show)."""

MAX_MESSAGE_BYTES = 64 * 1024
MAX_NOTE_BYTES = 4 * 1024
"""A ref is read whole whenever refs are listed, so its message or reason is short."""

MIN_PREFIX = 4
"""Fewest digits of an id that are accepted."""

REFS = "refs/"
"""Prefixes of full names of refs, and of no other names."""

REF_SUFFIX = ".ref"
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\Z")
_HEX = re.compile(r"[0-9a-fA-F]+\Z")
_WHOLE_ID = re.compile(rf"[0-9a-fA-F]{{{2 * DIGEST_BYTES}}}\Z")
_RESERVED = "HEAD"
"""Means the default branch wherever a revision is read."""


NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of garbage collection: from the condemning of packs to the next one's.

    Attributes:
        number: Counts up. It may come again after an older gc/state was put back, so it only orders.
        nonce: Drawn when the generation begins, and never again: two generations are equal if, and only if,
            this is. Empty before the first one that a ref has seen.
    """

    number: int = 0
    nonce: bytes = b""

    def next(self) -> Generation:
        """The generation that begins now, after this one."""
        return Generation(self.number + 1, secrets.token_bytes(NONCE_BYTES))


def decode_generation(payload: Mapping[str, Any]) -> Generation:
    """The generation that a record of gc/state or of a ref is of.

    Raises:
        KeyError, TypeError, ValueError: it says none.
    """
    number, nonce = payload["generation"], payload["generation_nonce"]
    if type(number) is not int or not -1 <= number < MAX_GENERATION or not isinstance(nonce, bytes):
        raise TypeError(f"a generation of {number!r} and {nonce!r}")
    return Generation(number, nonce)


MAX_GENERATION = 1 << 62
"""No collection has so large a number, and a database holds little more."""

PLACEHOLDER_GENERATION = Generation(-1)
"""Generation of a ref that was created and has no target yet."""


class RefKind(Enum):
    """Branches move with commits, tags stay, pins keep a commit from being forgotten.

    Remote-tracking branches (`origin/main`) name what a branch of another repository named when it was last asked.
    """

    BRANCH = "refs/heads/"
    TAG = "refs/tags/"
    PIN = "refs/pins/"
    REMOTE = "refs/remotes/"

    @property
    def label(self) -> str:
        """Its name in messages."""
        return _LABELS[self]


BY_NAME = (RefKind.TAG, RefKind.BRANCH, RefKind.REMOTE)
"""Kinds that a revision may mean by a name alone."""

_LABELS = {RefKind.BRANCH: "branch", RefKind.TAG: "tag", RefKind.PIN: "pin", RefKind.REMOTE: "remote-tracking branch"}


@dataclass(frozen=True, slots=True)
class Move:
    """One entry of a ref's log."""

    time_us: int
    old: Digest | None
    new: Digest | None
    action: str
    author: str


@dataclass(frozen=True, slots=True)
class TagSignature:
    """Who signed what a tag says.

    Attributes:
        time_us: When, microseconds since the epoch, as the signer's clock had it. author: The name that the signer
            went by. Both are signed.
        blob: The signature (signing.py) of `tag_bytes`.
    """

    time_us: int
    author: str
    blob: bytes


def tag_bytes(key: str, target: Digest, note: str, *, time_us: int, author: str) -> bytes:
    """The signed bytes of a tag: where it is stored, the commit, the message, the time and the signer."""
    signed = {"name": key, "target": target, "message": note, "time_us": time_us, "author": author}
    return pack_canonical(["tag", VERSION, signed])


@dataclass(frozen=True, slots=True)
class Ref:
    """A ref as it was read.

    Attributes:
        target: The commit, or None for a placeholder.
        generation: gc generation that the last writer had seen.
        record: The stored bytes: what a swap expects to find; None: nothing is stored.
        note: Message of an annotated tag, reason of a pin; else empty.
        signature: Of what a tag says; None: it is not signed.
        signed_only: The branch takes no commit that its signers did not sign (core/signatures.py).
        pack: A hint: name of the meta pack that held the target when the ref was swapped to it; None: not said.
    """

    kind: RefKind
    name: str
    target: Digest | None
    generation: Generation
    log: tuple[Move, ...]
    record: bytes | None
    note: str = ""
    signature: TagSignature | None = None
    signed_only: bool = False
    pack: bytes | None = None

    @property
    def key(self) -> str:
        """Where its record is stored."""
        return ref_key(self.kind, self.name)

    @property
    def asks_signers(self) -> bool:
        """Whether the record of signers is to be read before a commit: the branch says so, or is begun now."""
        return self.signed_only or self.target is None


def is_whole_id(text: str) -> bool:
    """Whether `text` is all digits of an id, which no ref may be called."""
    return _WHOLE_ID.match(text) is not None


def reads_as_id(name: str) -> bool:
    """Whether `name` may be the first digits of an id."""
    return MIN_PREFIX <= len(name) < 2 * DIGEST_BYTES and _HEX.match(name) is not None


def check_name(name: str) -> str:
    """`name`, if it may name a branch or tag.

    Raises:
        InvalidInputError: empty, over-long, path tricks, control or other odd characters,
            or one that is a whole id.
    """
    if not isinstance(name, str):
        raise InvalidInputError(f"{shown_value(name)} is not a name of a branch or tag: give a text")
    allowed = "letters, digits, '.', '_', '-' and single '/' between parts"
    shown = repr(name if len(name) <= 80 else name[:77] + "...")
    if not name or len(name.encode("utf-8", "replace")) > MAX_NAME_BYTES:
        raise InvalidInputError(f"{shown} is not a name: give 1 to {MAX_NAME_BYTES} bytes of {allowed}")
    for part in name.split("/"):
        if not _PART.match(part) or ".." in part or part.endswith((".", REF_SUFFIX, ".lock")):
            raise InvalidInputError(f"{shown} is not a name for a branch or tag: use {allowed}, not {part!r}")
    if name == _RESERVED:
        raise InvalidInputError(f"{shown} means what is checked out: choose another name")
    if _WHOLE_ID.match(name):
        raise InvalidInputError(f"{shown} is the whole id of a commit: choose another name")
    return name


def check_new_name(name: str) -> str:
    """`name`, if a new branch, tag or pin may have it; and asking for a branch by this name is unambiguous.

    Raises:
        InvalidInputError: as for `check_name`, or it is the whole name of a ref: as such, revisions mean another one.
    """
    kind = next((kind for kind in RefKind if check_name(name).startswith(kind.value)), None)
    if name.startswith(REFS):
        instead = repr(name.removeprefix(kind.value)) if kind else "another one"
        raise InvalidInputError(f"{name!r} is a whole name, as refs have, and a revision only: give {instead}")
    return name


def ref_key(kind: RefKind, name: str) -> str:
    """Where the ref is stored. The suffix lets `a` and `a/b` exist side by side."""
    return f"{kind.value}{check_name(name)}{REF_SUFFIX}"


@dataclass(frozen=True, slots=True)
class Head:
    """Where the live state of a process came from, and where its next commit goes.

    Attributes:
        branch: The branch that commits go to. None: detached, a commit has to name its branch.
        commit: Hexadecimal id of the commit that the state came from. None: no commit that is known: nothing
            was checked out or committed yet or, without a branch, a checkout was broken off half-way.
        parts: Ids of other commits of which parts were restored into that state since; the next commit names them.
        keys: Patterns of what was restored of the last commit of which parts were.
    """

    branch: str | None
    commit: str | None = None
    parts: tuple[str, ...] = ()
    keys: tuple[str, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        parts = f", parts={self.parts!r}" if self.parts else ""
        return f"Head(branch={self.branch!r}, commit={self.commit!r}{parts})"

    @property
    def detached(self) -> bool:
        """Whether a commit has to name its branch."""
        return self.branch is None


def head_with_part(
    head: Head, commit: str, branch: str | None, keys: Sequence[str], *, is_whole: Callable[[Sequence[str]], bool]
) -> Head:
    """Where a state came from of which a part was restored.

    Parts of one commit that are all of it are that commit. Else what the state came from before stays that, if it is
    known, and the commit is one of `parts`.

    Args:
        head: Where it came from before.
        commit: The commit that the part is of. branch: The branch that named it, if one did.
        keys: Patterns of the part.
        is_whole: Whether patterns cover all of the commit.
    """
    if head.keys and commit in (head.parts or (head.commit,))[-1:]:
        keys = tuple(dict.fromkeys((*head.keys, *keys)))
    if is_whole(keys):
        return Head(branch, commit)
    if head.commit is None and not head.detached and not head.parts:
        return Head(branch, commit, keys=tuple(keys))
    if commit == head.commit:  # the next part of another commit stands alone then: this one may have gone over it
        return replace(head, keys=() if head.parts else tuple(keys))
    parts = tuple(part for part in head.parts if part != commit)
    return replace(head, parts=(*parts, commit), keys=tuple(keys))


UNKNOWN_HEAD = Head(None, None)
"""A checkout was broken off after it had begun to write."""


def new_move(old: Digest | None, new: Digest | None, action: str, author: str) -> Move:
    """A log entry of now."""
    return Move(int(clock.now_s() * 1e6), old, new, action, author)


def encode_ref(ref: Ref) -> bytes:
    """A record of `ref`, with a nonce of its own; `ref.record` does not count."""
    moves = [[move.time_us, move.old, move.new, move.action, move.author] for move in ref.log]
    payload: dict[str, Any] = {
        "target": ref.target, "generation": ref.generation.number, "generation_nonce": ref.generation.nonce,
        "nonce": secrets.token_bytes(NONCE_BYTES), "log": moves,
    }  # fmt: skip
    if ref.note:
        payload["note"] = ref.note
    if ref.signature is not None:
        payload["signature"] = [ref.signature.time_us, ref.signature.author, ref.signature.blob]
    if ref.signed_only:
        payload["signed_only"] = True
    if ref.pack is not None:
        payload["pack"] = ref.pack
    return seal("ref", VERSION, payload, key=ref.key)


def decode_ref(kind: RefKind, name: str, key: str, record: bytes) -> Ref:
    """The ref whose record is stored under `key`.

    Raises:
        CorruptionError: the record is damaged, of another key, or of odd form.
    """
    payload = unseal("ref", record, version=VERSION, key=key)
    try:
        target, generation = payload["target"], decode_generation(payload)
        log = tuple(starmap(_decode_move, payload["log"]))
        if len(log) > MAX_LOG:
            raise ValueError(f"a log of {len(log)} moves")
        note = str(payload.get("note", ""))
        signature = None
        if "signature" in payload:
            match payload["signature"]:
                case [int() as time_us, str() as author, bytes() as blob] if type(time_us) is int and blob:
                    signature = TagSignature(time_us, author, blob)
                case _:
                    raise ValueError("a signature that is not a time, a name and bytes")
        if payload.get("signed_only", True) is not True:
            raise ValueError("signed_only is neither absent nor true")
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{key}: a ref record of odd form: {error!r}") from error
    if target is not None and (not isinstance(target, bytes) or len(target) != DIGEST_BYTES):
        raise CorruptionError(f"{key}: a ref that names no id")
    pack = payload.get("pack")
    if pack is not None and (not isinstance(pack, bytes) or len(pack) != NAME_BYTES):
        raise CorruptionError(f"{key}: a ref that names no pack")
    known = None if target is None else Digest(target)
    return Ref(kind, name, known, generation, log, record, note, signature, "signed_only" in payload, pack)


def _decode_move(time_us: Any, old: Any, new: Any, action: Any, author: Any) -> Move:
    if type(time_us) is not int or not isinstance(action, str) or not isinstance(author, str):
        raise TypeError("a move that is not a time, two ids and two texts")
    for one in (old, new):
        if one is not None and (not isinstance(one, bytes) or len(one) != DIGEST_BYTES):
            raise ValueError("a move from or to what is no id")
    return Move(time_us, old, new, action, author)


def check_text(name: str, text: str) -> None:
    """Refuse what a record cannot carry as text: another type, not UTF-8, or longer than a page.

    Args:
        name: What the text is for, in the message.
    Raises:
        InvalidInputError: as above.
    """
    if not isinstance(text, str):
        raise InvalidInputError(f"the {name} is a {type(text).__name__}, not text")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"the {name} cannot be written as UTF-8: {error}") from error
    if num_bytes > MAX_MESSAGE_BYTES:
        raise InvalidInputError(f"the {name} is longer than {MAX_MESSAGE_BYTES} bytes: put long text into meta=")


def check_note(name: str, text: str) -> None:
    """Refuse what a ref cannot carry as its message or reason.

    Raises:
        InvalidInputError: no text, or longer than a short letter.
    """
    check_text(name, text)
    if len(text.encode()) > MAX_NOTE_BYTES:
        raise InvalidInputError(f"the {name} is longer than {MAX_NOTE_BYTES} bytes: shorten it")


def default_author() -> str:
    """The default author: user@host."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
