"""The request of a commit: its fields, its branch, their checks, and revisions resolved to ids.

    1. `checked_fields`, on every rank: what can be stored, encoded
    2. `settle_ancestry`, on the rank that publishes: revisions become ids, provenance is captured; before it
       `with_declared_head`, where the caller says what the state came from
    3. `settle_destination`, on the same rank, before anything is hashed: which branch, what the state came from, and
       whether the branch may be begun; the others are told the branch

Invariant: what passes 1 can be encoded; revisions are resolved once, by one process, when the commit begins: what
several ranks agree on is the text that they were given. Nothing of the state is looked at. Provenance never makes a
commit fail: what cannot be found out is left out. No environment variables are read, so that no secret is kept by
default; the command line is kept, but for passwords, keys and tokens.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import cas_ckpt
from cas_ckpt.arguments import (
    FrozenCheck,
    Keys,
    OnConflict,
    OnDivergence,
    ReplicaCheck,
    SnapshotKind,
    WorkerKind,
    check_choice,
    check_flags,
    check_real,
    check_whole,
    checked_step,
)
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.publish import ANY_HEAD, AnyHead, Destination, branch_target, check_free
from cas_ckpt.core.records import PARTLY_FROM, Lineage
from cas_ckpt.core.refs import Head, RefKind, check_name, check_new_name, check_text, default_author, is_whole_id
from cas_ckpt.core.revisions import nearly, other_meaning, resolve, resolve_named, revision_text
from cas_ckpt.core.signatures import require_signer
from cas_ckpt.errors import InvalidInputError, NotFoundError, shown_value
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.nodes import LineageEdge, Node, is_lineage_kind
from cas_ckpt.objects.values import decode_value, encode_value
from cas_ckpt.ops.commit.options import CommitOptions
from cas_ckpt.storage.url import SECRET, without_secrets

REQUIRES_GRAD = "requires_grad"
"""As a pattern of `frozen=`: all parameters that require no gradient."""

GIT_TIMEOUT_S = 10
"""A working directory on a slow network disk must not hold up a commit for long."""


_CHOICES: Mapping[str, Any] = {
    "on_conflict": OnConflict, "on_divergence": OnDivergence, "frozen_check": FrozenCheck,
    "replica_check": ReplicaCheck, "snapshot": SnapshotKind, "worker": WorkerKind,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest(CommitOptions):
    """A commit as a verb asks for it: its options, what the call says, and what the verb adds.

    Attributes:
        branch: Name of the branch; None: where `head` says, or the default branch.
        head: Where the state came from, see core/publish.py; None: not known, and the commit goes on top
            of whatever the branch names, which it begins if need be. `came_from` takes its place.
        step: Training step. metrics: Numbers by name; NaN and infinities too.
        meta: A plain value of the user's.
        frozen: Patterns of keys whose tensors do not change in this process.
        frozen_keys: Whole keys of more such tensors; may be empty, and may name what is not there.
        other_parents: Commits that this one joins, after the branch's head and before `parents`.
        command, folder: The command line of the provenance, and where git is asked for it; None: those of this
            process, its working directory, when the commit is made.
        sign: The absolute path of the key; only the rank that publishes needs it.
        look: Asked on every rank once all that it holds is saved, before it tells the others; what it raises ends the
            commit.
        announce: Told each commit that it may become, right before a ref is swapped to name it; on the rank that
            publishes. What it raises ends the commit.
        verb: What was called, as errors name it if other ranks call something else.
        called_at: Where in the user's program, "train.py:120"; "" if nobody knows.
        snapshot, worker: Of `commit_async`.
    """

    branch: str | None = None
    head: Head | None = None
    message: str | None = ""
    step: Any = None
    metrics: Mapping[str, Any] | None = None
    meta: Any = None
    frozen: Keys = None
    frozen_keys: frozenset[str] = frozenset()
    other_parents: Sequence[Digest] = ()
    command: Sequence[str] | None = None
    folder: str | None = None
    sign: str | None = None
    look: Callable[[], object] | None = None
    announce: Callable[[Node], object] | None = None
    verb: str = "commit"
    called_at: str = ""
    snapshot: SnapshotKind = "copy"
    worker: WorkerKind = "thread"

    @classmethod
    def of(cls, options: CommitOptions, **call: Any) -> CommitRequest:
        """The request that has these options."""
        given = {each.name: getattr(options, each.name) for each in fields(CommitOptions)}
        return cls(**given | call)


@dataclass(frozen=True, slots=True)
class Ancestry:
    """Where a commit comes from, resolved: only the process that publishes needs it."""

    parents: tuple[Digest, ...] = ()
    lineage: tuple[LineageEdge, ...] = ()
    provenance: bytes | None = None


@dataclass(frozen=True, slots=True)
class CommitFields:
    """The checked, encoded parts of a request that the commit holds.

    Attributes:
        lineage: (kind, revision, encoded metadata) as they were asked for.
        provenance: The mapping that is to be kept with what is captured, encoded; None: keep nothing.
    """

    message: str
    author: str
    step: int | None
    metrics: dict[str, float]
    meta: bytes | None
    lineage: tuple[tuple[str, str, bytes | None], ...] = ()
    provenance: bytes | None = None
    parents: tuple[str, ...] = ()
    came_from: str | None = None


def checked_fields(request: CommitRequest) -> CommitFields:
    """The fields of `request`, checked and encoded.

    Raises:
        InvalidInputError: says which field cannot be stored.
    """
    for name, choices in _CHOICES.items():
        check_choice(name, getattr(request, name), choices)
    check_flags(create=request.create, orphan=request.orphan, allow_pickle=request.allow_pickle)
    for name in ("frozen_audit", "replica_audit"):
        share = check_real(name, getattr(request, name))
        if not 0 <= share <= 1:
            raise InvalidInputError(f"{name} is {share}: give a number from 0 to 1")
    check_whole("max_in_flight", request.max_in_flight, least=1)
    if request.staging_bytes is not None:
        check_whole("staging_bytes", request.staging_bytes)
    if request.branch is not None:
        check_new_name(request.branch)
    author = request.author if request.author is not None else default_author()
    message = "" if request.message is None else request.message
    check_text("message", message)
    check_text("author", author)
    meta = None if request.meta is None else encode_value(request.meta, key="meta")
    given_metrics = {} if request.metrics is None else request.metrics
    if not isinstance(given_metrics, Mapping):
        raise InvalidInputError(
            f'metrics are {shown_value(request.metrics)}: give numbers by name, e.g. {{"loss": 2.3}}'
        )
    metrics = {}
    for name, value in given_metrics.items():
        detach = getattr(value, "detach", None)  # a loss that still belongs to a graph
        try:
            number = float(detach() if callable(detach) else value)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidInputError(f"metric {name!r} is not a number that a float can hold: {error}") from error
        check_text("name of a metric", name)
        if isinstance(value, (bool, str)):
            raise InvalidInputError(f"metric {name!r} is {value!r}: wanted a number")
        metrics[name] = math.nan if math.isnan(number) else number  # one NaN, so that equal commits have equal ids
    for name, listed in (("lineage", request.lineage), ("parents", request.parents)):
        if isinstance(listed, str) or not isinstance(listed, Sequence):
            raise InvalidInputError(f"{name} is {shown_value(listed)}: give a list")
    lineage = []
    for one in request.lineage:
        if not isinstance(one, Lineage):
            raise InvalidInputError(f'lineage holds {shown_value(one)}: wanted e.g. Lineage("fine-tune-of", "base")')
        if not isinstance(one.kind, str) or not is_lineage_kind(one.kind):
            raise InvalidInputError(
                f"{shown_value(one.kind)} is not a kind of lineage: use small letters, digits and '-'"
            )
        target = revision_text(one.target)
        check_text("name of what a state was made from", target)
        note = None if one.meta is None else encode_value(one.meta, key=f"metadata of {one.kind}")
        lineage.append((one.kind, target, note))
    parents = tuple(map(revision_text, request.parents))
    for revision in parents:
        check_text("name of a parent", revision)
    came_from = None if request.came_from is None else revision_text(request.came_from)
    step = None if request.step is None else checked_step(request.step)
    given = request.provenance
    provenance = None
    if given is not False and given is not None:
        if given is not True and not isinstance(given, Mapping):
            raise InvalidInputError(f"provenance is {shown_value(given)}: give True, False or a mapping")
        provenance = encode_value({} if given is True else dict(given), key="provenance")
    return CommitFields(message, author, step, metrics, meta, tuple(lineage), provenance, parents, came_from)


def decoded_lineage(checked: Iterable[tuple[str, str, bytes | None]]) -> list[Lineage]:
    """The lineage that `checked_fields` found, with notes of its own."""
    return [Lineage(kind, target, None if note is None else decode_value(note)) for kind, target, note in checked]


def working_folder() -> str:
    """Where this process is; "" if that folder is gone: git finds nothing there."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def capture_provenance(given: Mapping[str, Any], command: Sequence[str], folder: str | None = None) -> dict[str, Any]:
    """Host, command line, versions, and the git commit of `folder`, as for `git_state`; `given` goes over it."""
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "command": _without_secrets(command),
        "python": platform.python_version(),
        "cas_ckpt": cas_ckpt.__version__,
    }
    try:
        found["torch"] = version("torch")  # without importing it
    except PackageNotFoundError:
        pass  # torch is not needed to import safetensors, or to commit arrays
    git = git_state(folder)
    if git is not None:
        found["git"] = git
    return found | dict(given)


_NO_SECRET = re.compile(r"tokeni[sz]|tokens", re.IGNORECASE)
_OPTION = re.compile(r"[-+]{0,2}([A-Za-z][\w.-]*)(=?)")
_KEY_OF_SERVICE = re.compile(
    r"(?<!\w)((sk|xox[a-z]|glpat)-|gh[a-z]_|github_pat_|hf_|AKIA|ASIA|eyJ|bearer\s+)[\w.~+/=-]{12,}", re.IGNORECASE
)


def _without_secrets(command: Iterable[str]) -> list[str]:
    """The words of a command line, `***` in place of what an option calls a secret, or what has the form of one."""
    found, is_value = [], False
    for raw in command:
        # without the lone surrogates that stand for bytes which are not UTF-8
        word = _KEY_OF_SERVICE.sub("***", without_secrets(raw.encode("utf-8", "backslashreplace").decode()))
        option = _OPTION.match(word)
        is_secret = option is not None and bool(SECRET.search(option[1])) and not _NO_SECRET.search(option[1])
        if is_value and not word.startswith("--"):
            word, is_secret = "***", False
        elif option is not None and is_secret and option[2]:
            word = f"{option[0]}***"
        found.append(word)
        is_value = is_secret and word.startswith("-") and "=" not in word
    return found


def git_state(folder: str | Path | None = None) -> dict[str, Any] | None:
    """{"commit": id, "dirty": whether tracked files differ from it}, or None where git knows nothing.

    Args:
        folder: None is the working directory.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: str | Path | None, *words: str) -> str | None:
    program = shutil.which("git")
    if program is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603  # fixed words, no shell
            [program, "--no-optional-locks", *words],
            cwd=folder, capture_output=True, stdin=subprocess.DEVNULL, timeout=GIT_TIMEOUT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip()


def with_declared_head(handle: RepositoryHandle, request: CommitRequest, fields: CommitFields) -> CommitRequest:
    """`request` with the head that the state would have if what it is said to come from had been checked out.

    Raises:
        NotFoundError: no such commit.
    """
    if fields.came_from is None:
        return request
    digest, branch = resolve_named(handle, fields.came_from)
    goes_to = request.branch or branch or (None if request.head is None else request.head.branch)
    return replace(request, branch=goes_to, head=Head(branch, digest.hex()))


def settle_ancestry(handle: RepositoryHandle, request: CommitRequest, fields: CommitFields) -> Ancestry:
    """`request` with ids in place of revisions.

    Raises:
        NotFoundError: a revision that is not there (a whole id may be that of another repository's commit, as
            the target of lineage; a parent has to be here).
    """
    parents = tuple(map(partial(resolve, handle), fields.parents))
    provenance = None
    if fields.provenance is not None:
        found = capture_provenance(
            decode_value(fields.provenance), sys.argv if request.command is None else request.command, request.folder
        )
        provenance = encode_value(found, key="provenance")
    lineage = []
    for kind, revision, note in fields.lineage:
        lineage.append(LineageEdge(kind, lineage_target(handle, revision), note))
    parts = () if request.head is None else request.head.parts
    lineage += [LineageEdge(PARTLY_FROM, Digest(bytes.fromhex(part))) for part in parts]
    return Ancestry((*request.other_parents, *parents), tuple(lineage), provenance)


def lineage_target(handle: RepositoryHandle, revision: str) -> Digest:
    """The commit that `revision` names; a whole id is believed, whether or not that commit is here.

    Raises:
        NotFoundError: anything else that is not here.
    """
    if is_whole_id(revision):
        return Digest(bytes.fromhex(revision))
    try:
        return resolve(handle, revision)
    except NotFoundError as error:
        raise NotFoundError(
            f"lineage from {revision!r}: {error} (for a commit of another repository give its whole id)"
        ) from error


def settle_destination(handle: RepositoryHandle, request: CommitRequest, ancestry: Ancestry) -> Destination:
    """The destination of a commit that is about to be made.

    Args:
        ancestry: That of `request`, resolved.
    Raises:
        InvalidInputError: no branch is known, or the branch may not be begun like this. ConflictError: as for
            `Destination.parents`, before anything is hashed. NotFoundError: a parent that is not there.
        SignatureError: the branch takes signed commits only, and the key is none of its signers', or there is none.
    """
    head = request.head
    if head is None:
        branch = check_name(handle.default_branch if request.branch is None else request.branch)
        ref = handle.refs.find(RefKind.BRANCH, branch)
        if ref is None or ref.asks_signers:
            require_signer(handle, ref, branch, request.sign)
        if request.on_conflict == "retry":
            return Destination(branch)
        return Destination(branch, None if ref is None else ref.target)
    named = head.branch if request.branch is None else request.branch
    if named is None:
        raise _no_branch(handle, head)
    branch = check_name(named)
    ref = handle.refs.find(RefKind.BRANCH, branch)
    target = None if ref is None else ref.target
    origin = None if head.commit is None else Digest(bytes.fromhex(head.commit))
    attached = head.branch == branch and origin is not None
    if target is None and not attached:
        known = origin is not None or bool(ancestry.parents)
        if not _check_beginning(handle, branch, request, known=known):
            target = branch_target(handle, branch)
    if target is None and request.orphan:
        origin = None
    expected: Digest | None | AnyHead = ANY_HEAD
    if request.on_conflict == "raise":
        expected = origin if attached and target is not None else target
    declared = origin in ancestry.parents
    for edge in ancestry.lineage:
        declared = declared or origin == edge.target
    settled = Destination(branch, expected, origin, attached, declared, target is None or attached)
    settled.parents(handle, target)  # refused now rather than after the hashing
    if ref is None or ref.asks_signers:
        require_signer(handle, ref, branch, request.sign)
    return settled


def _no_branch(handle: RepositoryHandle, head: Head) -> InvalidInputError:
    if head.commit is None:
        return InvalidInputError(
            "a checkout was broken off after it had written a part of the state: check out again, or commit what "
            'there is to a branch by name (branch="NAME")'
        )
    start = short(bytes.fromhex(head.commit))
    return InvalidInputError(
        f"this state came from commit {start}, which was checked out by itself and not as a branch: commit it to a "
        f'new branch that begins there (branch="NAME"), or move a branch back and commit to that '
        f'(repo.branch("{handle.default_branch}", start="{start}", force=True), then '
        f'branch="{handle.default_branch}")'
    )


def _check_beginning(handle: RepositoryHandle, branch: str, request: CommitRequest, *, known: bool) -> bool:
    """Refuse to begin a history that nobody meant to begin; False: somebody has begun it meanwhile."""
    check_free(handle, RefKind.BRANCH, branch)
    names = [ref.name for ref in handle.refs.list(RefKind.BRANCH)]
    if branch in names:
        return False
    meaning = None if request.create else other_meaning(handle, branch)
    if meaning is not None:
        raise InvalidInputError(
            f"{branch!r} reads as {meaning}: create=True in CommitOptions begins the branch all the same"
        )
    meant = None if request.create else nearly(branch, names)
    if meant is not None:
        raise InvalidInputError(
            f"there is no branch {branch!r}: did you mean {meant!r}? create=True in CommitOptions begins {branch!r} "
            "all the same"
        )
    if known or request.orphan or not (names or any(True for _ in handle.refs.list(RefKind.TAG, RefKind.PIN))):
        return True
    raise InvalidInputError(
        f"there is no branch {branch!r}, and this state was not checked out from here, so that its history is not "
        f'known: begin the branch at a commit (repo.branch("{branch}", start=REF)), check out first '
        "(repo.checkout(REF, into=state)), or begin a history of its own (orphan=True in CommitOptions)"
    )
