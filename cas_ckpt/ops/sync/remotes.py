"""remotes: other repositories under short names, and which refs of theirs and ours go together.

    list, add, remove, rename, set    the settings of the repository (core/settings.py)
    opened                            the repository at a URL, or a bundle
    remote_named                      what a name, a URL or a path means
    recognise                         is it the repository that it was when it was first asked
    parse_refspec                     what people write for "this ref, to that one"

A branch `main` of the remote `origin` is remembered here as `refs/remotes/origin/main`, and as a revision it is written
`origin/main`.

Invariant: where a remote goes, its remote-tracking branches go; they keep their commits like any ref.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.host_cache import AUTO
from cas_ckpt.core.live import graph_behind, graph_with, live_sets, promised_commits, promisors, read_graph
from cas_ckpt.core.publish import take_away
from cas_ckpt.core.refs import REFS, Ref, RefKind, check_name, check_new_name
from cas_ckpt.core.revisions import split_name
from cas_ckpt.core.settings import Remote, Settings, change_settings, check_url, note_push, read_settings, stored_url
from cas_ckpt.errors import ConflictError, InvalidInputError, PermissionDeniedError, shown_value
from cas_ckpt.index import garbage
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.ops.sync.bundle import BundleStore, opened_bundle, require_prerequisites
from cas_ckpt.ops.sync.send import RefUpdate, SendOptions, send
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import path_of_url

FETCH_HEAD = "FETCH_HEAD"
"""Names what was fetched last from a place that has no name here, as in git."""

ORIGIN = "origin"
"""The remote that is meant where none is named; what `clone` calls the one that it copied."""


@contextmanager
def opened(
    url: str, *, read_only: bool, cache: str | os.PathLike[str] | None = AUTO, taker: RepositoryHandle | None = None
) -> Iterator[RepositoryHandle]:
    """The repository at `url`, or the commits of the bundle that the path names, for as long as the block takes.

    Args:
        cache: As for `RepositoryHandle.open`; `cache_place` of the repository on whose behalf it is opened.
        taker: Has to have what a bundle continues from; None: that is not looked at.
    Raises:
        NotFoundError: the bundle continues from commits that are not there. InvalidInputError: it is to be written.
    """
    path = path_of_url(url) if url.startswith("file://") else url
    if os.path.isfile(path):
        if not read_only:
            raise InvalidInputError(f"{url} is a file, nothing is pushed into it: repo.create_bundle writes one")
        with opened_bundle(path) as (store, source):
            if taker is not None:
                require_prerequisites(taker, store)
            yield source
        return
    other = RepositoryHandle.open(url, read_only=read_only, cache=cache)
    try:
        yield other
    finally:
        other.close()


@dataclass(frozen=True, slots=True)
class RemoteInfo:
    """A named remote.

    Attributes:
        fetch: Patterns of its branches that `fetch` brings; empty: all.
        push: Branches that `push` sends when none are named; empty: the one that is checked out.
        filter: Patterns of keys whose chunks `fetch` brings; empty: all.
        branches: Branch of the remote -> the commit that it named when it was last asked.
        repository: Id of the repository that it was when it was first asked; empty: it was not asked yet.
    """

    name: str
    url: str
    fetch: tuple[str, ...]
    push: tuple[str, ...]
    tier: bool
    promisor: bool
    filter: tuple[str, ...]
    branches: dict[str, str]
    repository: str = ""


def list_remotes(handle: RepositoryHandle) -> list[RemoteInfo]:
    """All named remotes, by name."""
    tracking = [ref for ref in handle.refs.list(RefKind.REMOTE) if ref.target is not None]
    return [
        RemoteInfo(
            remote.name, remote.url, remote.fetch, remote.push, remote.tier, remote.promisor, remote.filter,
            {_branch_of(remote.name, ref): ref.target.hex() for ref in _of(remote.name, tracking) if ref.target},
            remote.repository,
        )
        for remote in read_settings(handle.store).remotes
    ]  # fmt: skip


def _of(remote: str, refs: Sequence[Ref]) -> list[Ref]:
    return [ref for ref in refs if ref.name.startswith(f"{remote}/")]


def _branch_of(remote: str, ref: Ref) -> str:
    return ref.name.removeprefix(f"{remote}/")


@dataclass(frozen=True, slots=True)
class Tracked:
    """How a branch here stands to the branch of the same name of a remote, as that was when it was last asked.

    Attributes:
        remote_branch: `origin/main`.
        ahead, behind: Commits that only the branch here, or only the one there leads to.
    """

    remote_branch: str
    ahead: int
    behind: int


def tracked_branches(handle: RepositoryHandle) -> dict[str, Tracked]:
    """Branch -> how it stands to that of `origin`, or of the only remote; of branches that are known there."""
    remotes = [remote.name for remote in read_settings(handle.store).remotes]
    remote = ORIGIN if ORIGIN in remotes else remotes[0] if len(remotes) == 1 else None
    if remote is None:
        return {}
    heads = {(ref.kind, ref.name): ref.target for ref in handle.refs.list(RefKind.BRANCH, RefKind.REMOTE) if ref.target}
    found = {}
    for (kind, name), ours in heads.items():
        theirs = heads.get((RefKind.REMOTE, f"{remote}/{name}"))
        if kind is RefKind.BRANCH and theirs is not None:
            found[name] = Tracked(f"{remote}/{name}", *_apart(handle, ours, theirs))
    return found


def _apart(handle: RepositoryHandle, ours: Digest, theirs: Digest) -> tuple[int, int]:
    if ours == theirs:
        return 0, 0
    graph = graph_with(handle, [ours, theirs])
    here, there = graph.reached([ours]), graph.reached([theirs])
    return len(here - there), len(there - here)


def add_remote(handle: RepositoryHandle, made: Remote) -> Remote:
    """Let a name mean another repository, which need not be there yet.

    Raises:
        ConflictError: there is a remote of that name. InvalidInputError: no possible name; or a promisor of a
            repository that is not on a local disk.
    """
    check_promisor(handle.store, made.promisor)
    return _note(handle, made)


def _note(handle: RepositoryHandle, made: Remote) -> Remote:
    handle.require_writable()
    check_new_name(f"{made.name}/main")  # as its branches are called here

    def add(held: Settings) -> Settings:
        if any(remote.name == made.name for remote in held.remotes):
            raise ConflictError(f"there is a remote {made.name!r} already: repo.set_remote changes it")
        return held.with_remote(made)

    change_settings(handle.store, add)
    return made


def set_remote(handle: RepositoryHandle, name: str, **changes: Any) -> Remote:
    """Change these fields of a remote; what it is then. Where the URL is given, another repository may be there.

    Raises:
        NotFoundError: there is no such remote. InvalidInputError: the URL carries a secret; a filter of what is no
            promisor; or a promisor of a repository that is not on a local disk.
    """
    handle.require_writable()

    def change(held: Settings) -> Settings:
        was = held.remote(name)
        moved = was.moved or ("url" in changes and bool(was.repository))
        made = replace(was, moved=moved, **changes)
        if "promisor" in changes:
            check_promisor(handle.store, made.promisor)
        return held.with_remote(made)

    return change_settings(handle.store, change).remote(name)


def recognise(handle: RepositoryHandle, other: RepositoryHandle, remote: Remote, *, dry_run: bool) -> None:
    """Check that `other` is the repository that the remote was when it was first asked; note its id the first time.

    Where another one is meant since (`Remote.moved`), what was remembered of branches of the former one goes, if it
    is not so there and this repository's own refs keep the commits: else nothing would be pushed that seems to be
    there. A bundle is a file, and a new one each time.

    Raises:
        ConflictError: it is another one, and the URL was not set since.
    """
    found = other.config.store_id
    if isinstance(other.store, BundleStore):
        return
    remote.require_same(found)
    if (remote.repository == found and not remote.moved) or dry_run or handle.read_only:
        return
    if remote.repository not in ("", found):
        _forget_untrue(handle, other, remote.name)

    def note(held: Settings) -> Settings:
        same = [one for one in held.remotes if (one.name, one.url) == (remote.name, remote.url)]
        return held.with_remote(replace(same[0], repository=found, moved=False)) if same else held

    with suppress(PermissionDeniedError):  # of somebody who may push and fetch here, and change no settings
        change_settings(handle.store, note)


def _forget_untrue(handle: RepositoryHandle, other: RepositoryHandle, name: str) -> None:
    there = {f"{name}/{ref.name}": ref.target for ref in other.refs.list(RefKind.BRANCH)}
    refs = list(handle.refs.whole())
    own = [ref.target for ref in refs if ref.kind is not RefKind.REMOTE and ref.target is not None]
    kept = graph_behind(handle, own).reached(own)
    for ref in _of(name, [ref for ref in refs if ref.kind is RefKind.REMOTE]):
        if ref.target in kept and there.get(ref.name) != ref.target:
            take_away(handle, ref, f"{name} is another repository")


def check_promisor(store: Store, promisor: bool) -> None:
    """Refuse a promisor of a repository that is not near.

    Raises:
        InvalidInputError: `store` is not on a local disk.
    """
    if promisor and not store.abilities.local:
        raise InvalidInputError(
            f"{store.url} is not on a local disk, and nothing is brought there when it is read: only what is "
            "near does without a part of what it names (a filter, a promisor)"
        )


def remove_remote(handle: RepositoryHandle, name: str) -> Remote:
    """Take the remote and its remote-tracking branches away; what it was. The other repository is not touched.

    Raises:
        NotFoundError: there is no such remote. ConflictError: it promised chunks that are not here.
    """
    handle.require_writable()
    gone = read_settings(handle.store).remote(name)
    if gone.promisor:
        _require_unneeded(handle, gone)
    return _take_remote_away(handle, gone)


def _require_unneeded(handle: RepositoryHandle, remote: Remote) -> None:
    """Refuse to give up a promise without which chunks would be lost."""
    graph, refs = read_graph(handle), list(handle.refs.every())
    others = promised_commits(graph, refs, [one for one in promisors(handle.store) if one.name != remote.name])
    sets = live_sets(handle, refs=refs)
    roots = {graph.commits[commit].root for commit in others if commit in graph} & sets.promised
    with garbage.living(handle.index, commits=sets.commits, roots=sets.roots) as living:
        needed = living.missing(1) and living.missing(1, promised=roots)
    if needed:
        raise ConflictError(
            f"remote {remote.name!r} keeps chunks that commits here need and that are not here, such as "
            f"{short(needed[0])}: bring them (repo.fetch({remote.name!r}, filter='**')), or give them up first "
            f"(repo.set_remote({remote.name!r}, promisor=False, filter=()))"
        )


def _take_remote_away(handle: RepositoryHandle, gone: Remote) -> Remote:
    name = gone.name
    for ref in _of(name, list(handle.refs.whole(RefKind.REMOTE))):
        take_away(handle, ref, f"remote {name} removed")
    change_settings(handle.store, lambda held: held.without_remote(name))
    note_push(handle.store, name, None)
    return gone


def rename_remote(handle: RepositoryHandle, old: str, new: str) -> Remote:
    """Let `new` be what `old` was, its remote-tracking branches too.

    Dying in the middle leaves both names; then rename again after removing the new one.

    Raises:
        NotFoundError: there is no remote `old`. ConflictError: there is one called `new`.
    """
    held = read_settings(handle.store).remote(old)
    made = _note(handle, replace(held, name=new))
    tracking = _of(old, list(handle.refs.list(RefKind.REMOTE)))
    remember(handle, {f"{new}/{_branch_of(old, ref)}": ref.target for ref in tracking}, f"renamed from {old}")
    _take_remote_away(handle, held)
    return made


def remember(handle: RepositoryHandle, tracking: Mapping[str, Digest | None], action: str) -> None:
    """Let remote-tracking branches name commits that this repository has, wherever they were before.

    Args:
        tracking: Name of a remote-tracking branch -> the commit; None: it is gone there, and goes here.
    """
    known = {ref.name for ref in handle.refs.list(RefKind.REMOTE)} if None in tracking.values() else set()
    updates = [
        RefUpdate(RefKind.REMOTE, name, target, force=True)
        for name, target in tracking.items() if target is not None or name in known
    ]  # fmt: skip
    if updates:
        send(handle, handle, updates, SendOptions(action), near=handle)


def remote_named(
    handle: RepositoryHandle, given: str | os.PathLike[str] | None
) -> tuple[str | None, str, Remote | None]:
    """(name, URL, settings) of what people wrote for a remote; name and settings are None for a URL or a path.

    Args:
        given: A name, a URL, or a path; None: `origin`.
    Raises:
        NotFoundError: neither a remote nor a place. InvalidInputError: a URL with a secret in it.
    """
    settings = read_settings(handle.store)
    text = ORIGIN if given is None else os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(text, str):
        raise InvalidInputError(f"{shown_value(given)} is not a remote: give a name, a URL or a path")
    named = next((remote for remote in settings.remotes if remote.name == text), None)
    if named is not None:
        return named.name, named.place(handle.store), named
    if given is None or (isinstance(given, str) and "/" not in text and not os.path.exists(text)):
        settings.remote(text)  # raises, and says which there are
    return None, check_url(text) if text.isprintable() else stored_url(text), None


def is_wanted(branch: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns matches; without patterns all are wanted."""
    return not patterns or any(fnmatchcase(branch, pattern) for pattern in patterns)


def list_remote(handle: RepositoryHandle, remote: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """Whole name of each branch and tag of another repository -> the commit that it names there, as it is asked now."""
    _, url, _ = remote_named(handle, remote)
    with opened(url, read_only=True, cache=handle.cache_place) as other:
        refs = list(other.refs.list(RefKind.BRANCH, RefKind.TAG))
    return {f"{ref.kind.value}{ref.name}": ref.target.hex() for ref in refs if ref.target is not None}


_REFSPEC = re.compile(r"(?P<force>\+?)(?P<source>[^:+]*)(?P<colon>:?)(?P<target>[^:]*)\Z")


@dataclass(frozen=True, slots=True)
class Refspec:
    """A parsed refspec: a ref or revision of this side, and the ref at the other side.

    Attributes:
        source: Empty: the other side's ref is to be deleted.
        target: Empty: of the same name.
    """

    source: str
    target: str
    force: bool = False


def parse_refspec(text: str) -> Refspec:
    """`SOURCE`, `SOURCE:TARGET`, `:TARGET` (delete), each with a `+` before it to force, as in git.

    Raises:
        InvalidInputError: another form.
    """
    match = _REFSPEC.match(text) if isinstance(text, str) and len(text) <= 4096 else None
    if match is None or not (match["source"] or match["target"]) or (match["colon"] and not match["target"]):
        raise InvalidInputError(f"{shown_value(text)} is not SOURCE, SOURCE:TARGET or :TARGET")
    return Refspec(match["source"], match["target"], bool(match["force"]))


def whole_name(name: str, kind: RefKind) -> tuple[RefKind, str]:
    """Kind and name of the ref that `name` means: refs/heads/x, refs/tags/x, refs/pins/x, or x, of the kind `kind`.

    Raises:
        InvalidInputError: no possible name.
    """
    each, plain = split_name(name)
    if each is not None and each is not RefKind.REMOTE:
        return each, check_name(plain)
    if name.startswith(REFS):
        raise InvalidInputError(f"{shown_value(name)}: give a branch, a tag or a pin of the other side")
    return kind, check_name(name)
