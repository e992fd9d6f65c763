"""resolve: from what people write (`main`, `main~2`, `v1`, `3fa9c1`) to a commit's id."""

from __future__ import annotations

import re

from cas_ckpt.errors import AmbiguousIdError, InvalidInputError, NotFoundError
from cas_ckpt.objects.digest import DIGEST_BYTES, Digest
from cas_ckpt.objects.kinds import ObjectKind
from cas_ckpt.ops.records import commit_of
from cas_ckpt.refs import RefKind, check_name
from cas_ckpt.repository import RepositoryHandle

MIN_PREFIX = 4
"""Fewest digits of an id that are accepted."""

_REVISION = re.compile(r"(?P<base>[^~^]+)(?P<steps>(?:~\d*|\^\d*)*)\Z")
_STEP = re.compile(r"([~^])(\d*)")
_HEX = re.compile(r"[0-9a-fA-F]+\Z")
_MAX_REVISION = 4096


def resolve(handle: RepositoryHandle, revision: str) -> Digest:
    """The id of the commit that `revision` names.

    `HEAD` and `@` are the default branch; then tags, then branches, then id prefixes of at
    least four digits. `~N` goes N first parents back, `^N` to the N-th parent. The whole name of
    a ref, `refs/heads/NAME`, `refs/tags/NAME` or `refs/pins/NAME`, means that one alone.

    Raises:
        NotFoundError: no such ref or id. AmbiguousIdError: several ids begin like this.
        InvalidInputError: not a revision.
    """
    match = _REVISION.match(revision) if len(revision) <= _MAX_REVISION else None
    if match is None:
        raise InvalidInputError(f"{_shown(revision)} is no revision: give a branch, a tag, an id, with ~N or ^N behind")
    digest = _base(handle, match["base"])
    for sign, number in _STEP.findall(match["steps"]):
        count = int(number) if number else 1
        digest = _back(handle, digest, count, revision) if sign == "~" else _parent(handle, digest, count, revision)
    return digest


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _base(handle: RepositoryHandle, name: str) -> Digest:
    if name in ("HEAD", "@"):
        name = handle.config.default_branch
    for kind in RefKind:
        if name.startswith(kind.value):
            return _ref(handle, [kind], name.removeprefix(kind.value))
    if _HEX.match(name) and MIN_PREFIX <= len(name) <= 2 * DIGEST_BYTES:
        return _by_prefix(handle, name.lower())
    return _ref(handle, [RefKind.TAG, RefKind.BRANCH], name)


def _ref(handle: RepositoryHandle, kinds: list[RefKind], name: str) -> Digest:
    check_name(name)
    for kind in kinds:
        try:
            target = handle.refs.get(kind, name).target
        except NotFoundError:
            continue
        if target is not None:
            return target
    raise NotFoundError(
        f"there is no branch, tag or commit {name!r}: cas-ckpt branch and cas-ckpt tag list what there is"
    )


def _by_prefix(handle: RepositoryHandle, prefix: str) -> Digest:
    found = handle.index.resolve_prefix(prefix, [ObjectKind.COMMIT])
    if not found:
        handle.sync()
        found = handle.index.resolve_prefix(prefix, [ObjectKind.COMMIT])
    if not found:
        raise NotFoundError(f"no commit's id begins with {prefix}")
    if len(found) > 1:
        shown = ", ".join(sorted(digest.hex()[: len(prefix) + 4] for digest in found)[:5])
        raise AmbiguousIdError(f"{len(found)} commits begin with {prefix} ({shown} ...): give more digits")
    return Digest(found[0])


def parents_of(handle: RepositoryHandle, digest: Digest) -> tuple[Digest, ...]:
    """Ids of a commit's parents, from the index or, if it does not know it, the store."""
    row = handle.index.commit(digest) or commit_of(handle, digest)
    return tuple(Digest(parent) for parent in row.parents)


def _back(handle: RepositoryHandle, digest: Digest, count: int, revision: str) -> Digest:
    for done in range(count):
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
