"""Revisions: from what people write (`main`, `main~2`, `v1`, `3fa9c1`) to a commit's id."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from cas_ckpt.arguments import did_you_mean
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import commit_of, log_rows
from cas_ckpt.core.refs import BY_NAME, REFS, Ref, RefKind, check_name, is_whole_id, reads_as_id
from cas_ckpt.core.settings import read_settings
from cas_ckpt.errors import AmbiguousIdError, InvalidInputError, NotFoundError, shown_value
from cas_ckpt.index import contents, history
from cas_ckpt.index.rows import CommitFilter
from cas_ckpt.objects.digest import Digest, ObjectKind, short

if TYPE_CHECKING:
    from cas_ckpt.signing import Trust

_LOGGER = logging.getLogger("cas_ckpt")


class Identified(Protocol):
    """An object with the id of a commit, such as `CommitInfo`."""

    @property
    def id(self) -> str: ...


Revision: TypeAlias = str | Identified
"""Types of a revision: text, or an object that has the id of a commit."""

HEAD_NAMES = ("HEAD", "@")

_NAME_DIGITS = 6
"""Most digits of a name that wins over an id which begins like it: `2024`, `feed`. Ids that are meant as such, copied
from a log or chosen by whoever wants them to be taken for another, have more."""

_REVISION = re.compile(r"(?P<base>[^~^]+)(?P<steps>(?:~\d*|\^\d*)*)\Z")
_STEP = re.compile(r"([~^])(\d*)")
_AT_STEP = re.compile(r"(?:(?P<of>.+)@)?step:(?P<step>\d{1,19})\Z")
_MAX_REVISION = 4096


def revision_text(given: Any) -> str:
    """`given` as a revision: a text as it is, else the id that it has (a `CommitInfo`).

    Raises:
        InvalidInputError: neither.
    """
    text = given if isinstance(given, str) else getattr(given, "id", None)
    if not isinstance(text, str):
        raise InvalidInputError(f"{shown_value(given)} is not a revision: give a branch, a tag, an id, or a commit")
    return text


def revision_texts(given: Any) -> tuple[str, ...]:
    """Revisions of one, of several in a list, or of None."""
    if given is None:
        return ()
    several = isinstance(given, (Sequence, Set, Iterator)) and not isinstance(given, (str, bytes))
    return tuple(map(revision_text, given)) if several else (revision_text(given),)


def split_range(text: str) -> tuple[str, str] | None:
    """(A, B) of `A..B`, what B leads to and A does not; a side that is left out is HEAD. None: no range.

    Raises:
        InvalidInputError: `A...B`.
    """
    if "..." in text:
        raise InvalidInputError(f"{_shown(text)}: write A..B; what both come from is found by repo.merge_base(A, B)")
    before, dots, after = text.partition("..")
    return (before or HEAD_NAMES[0], after or HEAD_NAMES[0]) if dots else None


def resolve(handle: RepositoryHandle, revision: Revision) -> Digest:
    """The id of the commit that `revision` names.

    `HEAD` and `@` are the branch that was checked out, or the commit if none was (a fresh handle: the default
    branch). Else it is a tag, a branch, a branch of a remote (`origin/main`), or an id prefix of at least four digits;
    what is two of these is refused, but that a name of up to six digits wins over ids, with a warning. `~N` goes N
    first parents back, `^N` to the N-th parent. The whole name of a ref, `refs/heads/NAME`, `refs/tags/NAME`,
    `refs/pins/NAME` or `refs/remotes/NAME`, means that one alone. `step:N` is the latest commit of step N that HEAD
    leads to, and `REVISION@step:N` that which REVISION leads to.

    Raises:
        NotFoundError: no such ref or id. AmbiguousIdError: several ids begin like this, or it has two meanings.
        InvalidInputError: not a revision.
    """
    return resolve_named(handle, revision)[0]


def resolve_named(handle: RepositoryHandle, revision: Revision) -> tuple[Digest, str | None]:
    """The commit that `revision` names, and the branch if it is one and nothing else. Errors as for `resolve`."""
    digest, ref = resolve_ref(handle, revision)
    return digest, ref.name if ref is not None and ref.kind is RefKind.BRANCH else None


def resolve_ref(handle: RepositoryHandle, revision: Revision) -> tuple[Digest, Ref | None]:
    """The commit that `revision` names, and the branch, tag or pin if it is one and nothing else.

    Errors as for `resolve`.
    """
    revision = revision_text(revision)
    match = _REVISION.match(revision) if len(revision) <= _MAX_REVISION else None
    if match is None:
        raise InvalidInputError(
            f"{_shown(revision)} is not a revision: give a branch, a tag, an id, with ~N or ^N behind"
        )
    digest, ref = _base(handle, match["base"])
    for sign, number in _STEP.findall(match["steps"]):
        count = int(number) if number else 1
        digest = _back(handle, digest, count, revision) if sign == "~" else _parent(handle, digest, count, revision)
    return digest, None if match["steps"] else ref


def resolve_trusted(
    handle: RepositoryHandle, revision: Revision, trust: Trust | None = None
) -> tuple[Digest, str | None]:
    """What `resolve_named` gives, if the commit is signed as it has to be.

    Args:
        trust: Whose signature the commit, or the tag that names it, needs; None: that of `handle.trust`. If that is
            None as well, only branches that take signed commits only are looked at, by what the repository says.
    Raises:
        SignatureError: says why. And as for `resolve`.
    """
    digest, ref = resolve_ref(handle, revision)
    wanted = handle.trust if trust is None else trust
    if wanted is not None or (ref is not None and ref.signed_only):
        from cas_ckpt.core.signatures import require_trusted

        require_trusted(handle, digest, ref, wanted)
    return digest, ref.name if ref is not None and ref.kind is RefKind.BRANCH else None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


def likely_refs(handle: RepositoryHandle, revision: Revision) -> list[tuple[RefKind, str]]:
    """The refs near whose heads the commit that `revision` names is, as far as its text says."""
    base = re.split(r"[~^]|@step:", revision_text(revision), maxsplit=1)[0]
    if base in HEAD_NAMES:
        return [(RefKind.BRANCH, current_branch(handle))]
    kind, name = split_name(base)
    if kind is not None:
        return [(kind, name)]
    return [(RefKind.BRANCH, base), (RefKind.TAG, base)]


def _base(handle: RepositoryHandle, name: str) -> tuple[Digest, Ref | None]:
    step = _AT_STEP.match(name)
    if step is not None:
        return _at_step(handle, step["of"] or HEAD_NAMES[0], int(step["step"])), None
    if name in HEAD_NAMES:
        with handle.refs.one_look() if handle.believes_config else nullcontext():
            head = handle.head
            if head.branch is not None:
                return _required(handle, head.branch, named_ref(handle, RefKind.BRANCH.value + head.branch))
        if head.commit is None:
            raise InvalidInputError("HEAD is not known since a checkout was broken off: name a branch, a tag or an id")
        return Digest(bytes.fromhex(head.commit)), None
    if is_whole_id(name):
        return _by_prefix(handle, name.lower()), None
    ref = named_ref(handle, name)
    if ref is None and reads_as_id(name):
        return _by_prefix(handle, name.lower()), None
    return _required(handle, name, ref)


def current_branch(handle: RepositoryHandle) -> str:
    """The branch that was checked out, else the default branch."""
    return handle.default_branch if handle.head.branch is None else handle.head.branch


def _at_step(handle: RepositoryHandle, revision: str, step: int) -> Digest:
    start = resolve(handle, revision)
    found = next(log_rows(handle, [start], limit=1, wanted=CommitFilter(first_step=step, last_step=step)), None)
    if found is None:
        raise NotFoundError(
            f"{_shown(revision)} leads to no commit of step {step}: name the branch that does, "
            f"as in {handle.default_branch}@step:{step}"
        )
    return Digest(found.digest)


def split_name(name: str) -> tuple[RefKind | None, str]:
    """The kind of the ref whose whole name `name` is (refs/heads/x), and its name; None: it is no whole name."""
    kind = next((kind for kind in RefKind if name.startswith(kind.value)), None)
    return kind, name if kind is None else name.removeprefix(kind.value)


def named_ref(handle: RepositoryHandle, name: str) -> Ref | None:
    """The ref that `name` alone, or as a whole name, means; None: there is none.

    Raises:
        AmbiguousIdError: it means several, or another commit by the first digits of its id. InvalidInputError.
    """
    kind, plain = split_name(name)
    found = handle.refs.seen(BY_NAME if kind is None else [kind], check_name(plain))
    require_one(name, found)
    if found and kind is None:
        like = _commits_like(handle, plain) if reads_as_id(plain) else []
        others = [digest for digest in like if digest != found[0].target]
        if others:
            whole = f"{found[0].kind.value}{plain}"
            text = f"{name!r} is {whole}, and the id of commit {short(others[0])} begins like this"
            if len(plain) > _NAME_DIGITS:
                raise AmbiguousIdError(f"{text}: give more digits, or {whole} if the {found[0].kind.label} is meant")
            _LOGGER.warning("%s: the %s is taken; say %s", text, found[0].kind.label, whole)
    return found[0] if found else None


def require_one(name: str, found: Sequence[Ref]) -> None:
    """Raise AmbiguousIdError if these refs, which `name` means, are several."""
    if len(found) > 1:
        whole = " and ".join(f"{ref.kind.value}{ref.name}" for ref in found)
        raise AmbiguousIdError(f"{name!r} means several refs, {whole}: give the whole name of the one that is meant")


def other_meaning(handle: RepositoryHandle, name: str, *others: RepositoryHandle) -> str | None:
    """The other meaning that a new branch or tag called `name` would have, in words; None if there is none.

    Args:
        others: Repositories whose commits may come here: their ids count, too.
    """
    if name.startswith(REFS):
        return "the whole name of a ref"
    remote = name.partition("/")[0]
    if remote != name and any(one.name == remote for one in read_settings(handle.store).remotes):
        return f"a branch of the remote {remote!r}"
    for each in (handle, *others) if reads_as_id(name) and len(name) > _NAME_DIGITS else ():
        if found := _commits_like(each, name):
            return f"the first digits of the id of commit {short(found[0])}"
    return None


def _required(handle: RepositoryHandle, name: str, ref: Ref | None) -> tuple[Digest, Ref]:
    if ref is not None and ref.target is not None:
        return ref.target, ref
    handle.refs.require_there()
    kind, plain = split_name(name)
    kinds = BY_NAME if kind is None else [kind]
    similar = did_you_mean(plain, (ref.name for ref in handle.refs.list(*kinds) if ref.target is not None))
    raise NotFoundError(f"there is no branch, tag or commit {name!r}{similar}: see repo.branches() and repo.tags()")


def _commits_like(handle: RepositoryHandle, name: str) -> list[bytes]:
    """Some of the commits whose ids begin with `name`."""
    found = handle.index.read(contents.resolve_prefix, name, [ObjectKind.COMMIT])
    if not found:
        handle.sync()
        found = handle.index.read(contents.resolve_prefix, name, [ObjectKind.COMMIT])
    return found


def _by_prefix(handle: RepositoryHandle, prefix: str) -> Digest:
    found = _commits_like(handle, prefix)
    if not found:
        raise NotFoundError(f"there is no branch or tag {prefix!r}, and no commit's id begins like this")
    if len(found) > 1:
        shown = ", ".join(sorted(digest.hex()[: len(prefix) + 4] for digest in found)[:5])
        raise AmbiguousIdError(f"{len(found)} commits begin with {prefix} ({shown} ...): give more digits")
    return Digest(found[0])


def parents_of(handle: RepositoryHandle, digest: Digest) -> tuple[Digest, ...]:
    """Ids of a commit's parents, from the index or, if it does not know it, the store."""
    row = handle.index.read(history.read_commit, digest) or commit_of(handle, digest)
    return tuple(Digest(parent) for parent in row.parents)


def _back(handle: RepositoryHandle, digest: Digest, count: int, revision: str) -> Digest:
    line = handle.index.read(history.read_line, digest, most=count + 1)
    if len(line) == count + 1:
        return Digest(line[-1])
    for done in range(count):  # the index does not know all of them, or there are not so many
        parents = parents_of(handle, digest)
        if not parents:
            raise NotFoundError(f"{_shown(revision)} goes {count} commits back, but history begins after {done}")
        digest = parents[0]
    return digest


def _parent(handle: RepositoryHandle, digest: Digest, number: int, revision: str) -> Digest:
    if number == 0:
        return digest
    parents = parents_of(handle, digest)
    if number > len(parents):
        raise NotFoundError(f"{_shown(revision)}: that commit has {len(parents)} parents, not {number}")
    return parents[number - 1]


# ---------------------------------------------------------------- names that were meant to be others

_WORDS = re.compile(r"[a-z]+|\d+")
_MIN_LETTERS = 4
"""Shorter words differ in a letter because they mean something else: ft-a and ft-b."""


def nearly(name: str, names: Iterable[str]) -> str | None:
    """The first of `names` that `name` looks like a slip of: case, separators, or one letter of one word.

    Numbers must agree: `run-1` and `run-2` are two names of one series.
    """
    words = _WORDS.findall(name.casefold())
    return next((one for one in names if one != name and _one_slip(words, _WORDS.findall(one.casefold()))), None)


def _one_slip(words: Sequence[str], others: Sequence[str]) -> bool:
    if len(words) != len(others):
        return False
    differing = [pair for pair in zip(words, others, strict=True) if pair[0] != pair[1]]
    if len(differing) > 1:
        return False
    return all(one.isalpha() and other.isalpha() and _one_letter(one, other) for one, other in differing)


def _one_letter(one: str, other: str) -> bool:
    """Whether one letter was left out, added, mistaken, or changed places with its neighbour."""
    if max(len(one), len(other)) < _MIN_LETTERS:
        return False
    start = _common(one, other)
    end = min(_common(one[::-1], other[::-1]), len(one) - start, len(other) - start)
    left, right = one[start : len(one) - end], other[start : len(other) - end]
    return max(len(left), len(right)) <= 1 or (len(left) == 2 and left == right[::-1])


def _common(one: str, other: str) -> int:
    """How many letters agree from the beginning on."""
    pairs = list(zip(one, other, strict=False))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
