"""send: commits go from one repository to another, and refs there name them. Push, fetch and clone are this.

    s1  judge every ref that is to move, by where it is now: nothing is copied for a move that is refused
    s2  the other side's index agrees with its store, under a generation of garbage collection (w1)
    s3  which commits its refs keep there; the rest is gone through (missing.py), and what it lacks is copied, verified,
        into new packs there (transfer/copying.py; nodes: transfer/pack_writer.py), which its index learns of
        the commits themselves go last. Where one of them follows another, they are recorded as released before that:
        until a ref names them, they are not to be taken for orphans (core/live.py), which nothing would collect
    s4  commits that travel without their data are recorded as forgotten there
    s5  swap the refs, by the writer's protocol (core/publish.py): w2 to w6. If a collection began meanwhile: from s1
    s6  refs that are to be deleted, last; the record of s3 goes

A process that dies leaves packs that no ref needs yet. The next one finds them by the index, and copies the rest;
a collection removes them once they are older than --min-age.

Invariant: a ref names a commit only once all that it needs is durable there, seen or written under the generation that
gc/state has when the ref is swapped. The source is only read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum

from cas_ckpt.arguments import check_real
from cas_ckpt.core.forgotten import forgotten_view, read_forgotten, write_forgotten, write_released
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import Graph, graph_with, promised_commits, promisors, read_graph, unforget
from cas_ckpt.core.protocol import Session, read_gc_state
from cas_ckpt.core.publish import (
    ANY_HEAD,
    MAX_ATTEMPTS,
    AnyHead,
    GenerationMoved,
    publish_copied,
    ref_for_writing,
    shown_head,
    take_away,
)
from cas_ckpt.core.records import Brief
from cas_ckpt.core.refs import Generation, Move, Ref, RefKind, TagSignature, default_author, new_move
from cas_ckpt.core.signatures import check_move
from cas_ckpt.core.units import PackShard
from cas_ckpt.errors import ConflictError, InvalidInputError, NotFoundError, PermissionDeniedError
from cas_ckpt.memory import check_memory, current_limits
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.graph import CommitGraph
from cas_ckpt.ops.sync.missing import Batch, CommitPlan, Walk, plan_commits
from cas_ckpt.parallel.workers import default_threads
from cas_ckpt.progress import SILENT, Progress, phase
from cas_ckpt.transfer.copying import Throttle, copy_extents, least_bytes, plan_copies
from cas_ckpt.transfer.pack_writer import WrittenPack, write_nodes

_LOGGER = logging.getLogger("cas_ckpt")


class Moved(StrEnum):
    """Outcome of a ref update, or of its dry run."""

    NEW = "new"
    FORWARD = "fast-forward"
    FORCED = "forced"
    SAME = "up to date"
    DELETED = "deleted"
    REBASED = "rebased"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class RefUpdate:
    """An update of a ref at the target.

    Attributes:
        target: The commit; None: the ref is to be deleted.
        force: Also where the commit does not follow what the ref names now.
        expected: The commit that the ref must name now (None: nothing), or `ANY_HEAD`.
        note: Message of an annotated tag; None leaves what there is.
        signature: Of the tag with that note, if it has the same name at both sides.
    """

    kind: RefKind
    name: str
    target: Digest | None
    force: bool = False
    expected: Digest | None | AnyHead = ANY_HEAD
    note: str | None = None
    signature: TagSignature | None = None

    @classmethod
    def of(cls, ref: Ref, *, force: bool = False) -> RefUpdate:
        """The update that makes the ref of this kind and name what `ref` of another repository is."""
        note = None if ref.kind is RefKind.BRANCH else ref.note
        return cls(ref.kind, ref.name, ref.target, force, note=note, signature=ref.signature)

    @property
    def key(self) -> str:
        """Its whole name."""
        return f"{self.kind.value}{self.name}"


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How to send.

    Attributes:
        action: What the log of a ref says was done.
        max_bandwidth: Bytes a second at most; None: no limit.
        depth: Only so many commits on every way back from a tip come with their data; None: all.
        shard: Copy only chunks out of these packs of the source, and move no ref: the rest is a later push's.
        keys: Patterns of the keys whose chunks are copied, the others being promised by the source; empty: all.
        again: Go through commits that the target has already, too, unless they are forgotten there.
        assumed: Commits that whoever reads the target has, with all that they lead to: for a bundle.
    """

    action: str
    dry_run: bool = False
    max_bandwidth: float | None = None
    progress: Progress = SILENT
    depth: int | None = None
    shard: PackShard | None = None
    keys: tuple[str, ...] = ()
    again: bool = False
    assumed: frozenset[Digest] = frozenset()

    def __post_init__(self) -> None:
        if self.max_bandwidth is not None and check_real("max_bandwidth", self.max_bandwidth) <= 0:
            raise InvalidInputError(f"max_bandwidth is {self.max_bandwidth!r}: give bytes a second, above 0")


@dataclass(frozen=True, slots=True)
class MovedRef:
    """A ref that was moved, or would be: its whole name, what it named and names (whole ids, or None), and how."""

    ref: str
    old: str | None
    new: str | None
    how: Moved


@dataclass(frozen=True, slots=True, repr=False)
class SyncReport(Brief):
    """Copied bytes and moved refs, or (`dry_run`) those that would be.

    Attributes:
        url: The other repository.
        refs: What became of each ref.
        num_commits: Commits that the target did not have.
        num_forgotten: How many of them came without their data, as it was forgotten at the source.
        num_nodes, num_chunks: Objects that were copied: nodes (commits too), and extents of chunks.
        num_bytes: Bytes that they take as stored.
        num_packs: New packs at the target.
    """

    url: str
    refs: tuple[MovedRef, ...] = ()
    num_commits: int = 0
    num_forgotten: int = 0
    num_nodes: int = 0
    num_chunks: int = 0
    num_bytes: int = 0
    num_packs: int = 0
    dry_run: bool = False


def send(
    source: RepositoryHandle,
    target: RepositoryHandle,
    updates: Sequence[RefUpdate],
    options: SendOptions,
    *,
    near: RepositoryHandle,
) -> SyncReport:
    """Let refs of `target` name commits that `source` has, and copy what `target` lacks of these.

    Args:
        near: The one of the two whose reads are cheap.
    Raises:
        SignatureError: a branch there takes signed commits only: before anything was copied.
        ConflictError: a ref is not where it may be moved from: before anything was copied, or because somebody moved
            it meanwhile; then the refs before it in `updates` have moved.
        MemoryBudgetError: the limit of memory is too little; before anything was done.
        NotFoundError, CorruptionError: the source lacks something, or holds damaged bytes.
        PermissionDeniedError, StorageError: a store refused. Nothing is lost: send again.
    """
    check_memory(least_bytes(target.store), f"copying to {target.store.url}")
    if len({update.key for update in updates}) < len(updates):
        raise InvalidInputError("one ref is to be moved twice: name it once")
    with Session(target.store) as session:
        sending = _Sending(source, target, updates, options, near, session)
        for _ in range(MAX_ATTEMPTS):
            try:
                report = sending.attempt()
                sending.end()
                return report
            except GenerationMoved:
                target.forget_chunks()  # what was seen under the generation before does not count any more
            except ConflictError:
                sending.end()
                raise
    raise ConflictError(f"garbage collections began {MAX_ATTEMPTS} times at {target.store.url} meanwhile: try again")


def graph_of_both(source: RepositoryHandle, target: RepositoryHandle, tips: Sequence[Digest]) -> Graph:
    """Commits that the source has, and of a source that begins in the middle of history those of the target.

    Raises:
        NotFoundError: the source lacks one of `tips`.
    """
    graph = graph_with(source, tips)
    if graph.reached(tips) <= graph.commits.keys():
        return graph
    return CommitGraph({**read_graph(target).commits, **graph.commits})


@dataclass(slots=True)
class _Sending:
    """One `send`, whose report adds up over its attempts."""

    source: RepositoryHandle
    target: RepositoryHandle
    updates: Sequence[RefUpdate]
    options: SendOptions
    near: RepositoryHandle
    session: Session
    report: SyncReport = field(init=False)
    throttle: Throttle = field(init=False)
    moved: dict[str, MovedRef] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)
    counted: set[bytes] = field(default_factory=set)
    without_data: frozenset[Digest] = frozenset()
    again: frozenset[Digest] = frozenset()
    released: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.report = SyncReport(self.target.store.url, dry_run=self.options.dry_run)
        self.throttle = Throttle(self.options.max_bandwidth)

    def attempt(self) -> SyncReport:
        """s1 to s6."""
        tips = [update.target for update in self.updates if update.target is not None]
        graph = graph_of_both(self.source, self.target, tips)
        heads = {update.key: self.target.refs.find(update.kind, update.name) for update in self.updates}
        for update in self.updates:
            self._judge(update, heads[update.key], graph)
            if update.kind is RefKind.BRANCH and update.target is not None:  # now, and again at the swap
                check_move(self.target, heads[update.key], update.name, update.target, source=self.source)
        if not self.options.again and all(_is_settled(update, heads[update.key]) for update in self.updates):
            return self._reported()
        if self.options.dry_run:
            self.target.sync()
            generation = read_gc_state(self.target.store).generation
        else:
            generation = self.target.begin_writing()
        plan = self._plan(graph, tips, heads, generation)
        new = set(plan.commits) - self.again
        self.report = replace(self.report, num_commits=len(new), num_forgotten=len(new - plan.with_data))
        walk = Walk(self.source, self.target, plan, near=self.near, keys=self.options.keys)
        for batch in walk.batches():
            if self.options.shard is not None:
                batch = batch.of(self.options.shard)
            if batch.holds_commits and not self.options.dry_run:
                named = [update for update in self.updates if update.target is not None]
                if named and not any(heads.values()):
                    # s3: one is begun, as commits without a trace of a ref pass for those of lost refs.
                    ref_for_writing(self.target, named[0].kind, named[0].name)
                if len(plan.commits) > 1:
                    self._release(batch, tips)
            self._copy(batch, generation)
        if walk.unmatched and (self.options.again or not plan.kept or len(walk.unmatched) == len(self.options.keys)):
            _LOGGER.warning(
                "no tensor of the commits that came matches the filter %s: their chunks are brought when they are "
                "read; repo.ls(ref) lists the keys", ", ".join(map(repr, walk.unmatched)),
            )  # fmt: skip
        if self.options.shard is not None:
            return replace(self.report, refs=(), num_commits=0, num_forgotten=0)
        if not self.options.dry_run:
            # s4: what came without its data is forgotten there; what came with it is not, whatever records said.
            without_data = set(plan.commits) - plan.with_data - self.without_data - self.again
            if without_data:
                write_forgotten(self.target.store, without_data, author=default_author())
            back = self.without_data & plan.with_data
            if back:
                unforget(self.target, back)
            for update in sorted(self.updates, key=lambda each: each.target is None):
                self._move(update, graph, generation, brought=plan.with_data - self.without_data - self.again)
        return self._reported()

    def _release(self, batch: Batch, tips: Sequence[Digest]) -> None:
        """s3: no commit of `batch` is an orphan until a ref names it; tips lead to all of them once they are there."""
        own = {node.digest for node in batch.nodes}
        if not own.issuperset(tips):
            tips = [*tips, *own]
        elif self.released:
            return
        self.released = [*self.released, *write_released(self.target.store, tips)]

    def _reported(self) -> SyncReport:
        return replace(self.report, refs=tuple(self.moved[update.key] for update in self.updates))

    def end(self) -> None:
        """s6: what a ref names now, or named, is an orphan if that ref is lost; the rest is garbage."""
        if not self.released:
            return
        rest = [update.target for update in self.updates if update.target is not None and update.key not in self.named]
        if len(rest) < len(self.updates):
            if rest:
                write_released(self.target.store, rest)
            with suppress(PermissionDeniedError):  # the refs are there; gc takes out of a record what refs lead to
                for key in self.released:
                    self.target.store.delete(key)

    # --- refs ---------------------------------------------------------------------------------

    def _judge(self, update: RefUpdate, ref: Ref | None, graph: Graph) -> Moved:
        """Classify `update`, given the ref as it is now, and add it to the report.

        Raises:
            ConflictError: it may not be moved. NotFoundError: it is to be deleted, and is not there.
        """
        old, new = None if ref is None else ref.target, update.target
        where = f"{update.kind.label} {update.name!r} of {self.target.store.url}"
        if not isinstance(update.expected, AnyHead) and old not in (update.expected, new):
            raise ConflictError(
                f"{where} is at {shown_head(old)}, not at {shown_head(update.expected)} as expected: "
                "somebody moved it; fetch, look at it, then try again"
            )
        if new is None and old is None:
            raise NotFoundError(f"there is no {where}: nothing is to be deleted")
        how = _how(graph, update.kind, old, new)
        if how is Moved.FORCED and not update.force and isinstance(update.expected, AnyHead):
            if update.kind is RefKind.TAG:
                raise ConflictError(
                    f"{where} names {shown_head(old)} already, and tags stay: use force=True to move it"
                )
            known = (
                "which this commit does not follow" if old is not None and old in graph else "which is not known here"
            )
            raise ConflictError(
                f"{where} is at {shown_head(old)}, {known}: put the commits here on top of it "
                "(repo.pull(rebase=True)), push under another name, or replace it with force=True"
            )
        self.moved[update.key] = MovedRef(update.key, hex_of(old), hex_of(new), how)
        return how

    def _move(self, update: RefUpdate, graph: Graph, generation: Generation, *, brought: Collection[Digest]) -> None:
        """s5, s6: swap one ref."""
        new = update.target
        if new is None:
            ref = self.target.refs.get(update.kind, update.name)
            self._judge(update, ref, graph)
            if ref.target is not None:
                take_away(self.target, ref, f"{self.options.action}: deleted")
            return

        def admit(old: Digest | None) -> Move | None:
            ref = None if old is None else Ref(update.kind, update.name, old, Generation(), (), b"")
            how = self._judge(update, ref, graph)
            if how is Moved.FORWARD and _on_first_line(graph, old, new):
                return None  # the parents of the commits show it
            return new_move(old, new, f"{self.options.action}: {how}", default_author())

        publish_copied(
            self.target, update.kind, update.name, new, generation=generation, admit=admit, note=update.note,
            signature=update.signature, is_new=new in brought,
        )  # fmt: skip
        self.named.add(update.key)

    # --- what is there, and what is not -------------------------------------------------------

    def _plan(
        self, graph: Graph, tips: Sequence[Digest], heads: dict[str, Ref | None], generation: Generation
    ) -> CommitPlan:
        forgotten = forgotten_view(self.source) - set(tips)
        refs = [ref for ref in heads.values() if ref is not None]
        kept = self._kept(refs, generation)
        if not all(kept.intersection(graph.reached([tip])) for tip in tips):
            kept = self._kept(self.target.refs.list(), generation)
        self.without_data = read_forgotten(self.target.store)
        if self.options.depth is not None:
            forgotten |= {Digest(one) for one in graph.reached(tips) - _near(graph, tips, self.options.depth)}
        assumed = graph.ancestors(self.options.assumed)
        without_data = (self.without_data & kept) | (forgotten & assumed)
        promised = self._promised(graph)
        if self.options.again:
            self.again = frozenset(map(Digest, kept & promised))
            kept -= self.again
            forgotten |= self.without_data.difference(tips)
        return plan_commits(
            graph, tips, kept=kept | assumed, without_data=without_data, forgotten=forgotten, promised=promised
        )

    def _promised(self, graph: Graph) -> set[bytes]:
        """Commits that are promised to the target: as its refs say now, and as this fetch is going to let them say."""
        remotes = promisors(self.target.store)
        if not remotes:
            return set()
        names = tuple(f"{remote.name}/" for remote in remotes)
        own = [one for one in self.updates if one.kind is RefKind.REMOTE and one.name.startswith(names)]
        coming = [one.target for one in own if one.target is not None]
        refs = [ref for ref in self.target.refs.every() if ref.kind is RefKind.REMOTE]
        return promised_commits(read_graph(self.target), refs, remotes) | graph.reached(coming)

    def _kept(self, refs: Iterable[Ref], generation: Generation) -> set[bytes]:
        """Commits that these refs keep, with all that they lead to.

        Those of an earlier generation keep nothing for sure: the collection that is under way has not fenced them yet.
        """
        fenced = [
            ref.target for ref in refs
            if ref.target is not None and (ref.generation == generation or ref.generation.number > generation.number)
        ]  # fmt: skip
        graph = read_graph(self.target)
        return {digest for digest in graph.reached(fenced) if digest in graph}

    # --- copying ------------------------------------------------------------------------------

    def _copy(self, batch: Batch, generation: Generation) -> None:
        extents = [extent for extent in batch.extents() if extent[0] not in self.counted]
        nodes = [node for node in batch.nodes if node.digest not in self.counted]
        units = plan_copies(extents, pack_bytes=self.target.config.pack_bytes)
        copied = sum(unit.num_bytes for unit in units)
        packs: list[WrittenPack] = []
        if self.options.dry_run:
            self.counted.update([digest for digest, _ in extents], [node.digest for node in nodes])
        else:
            wanted = (getattr(handle.store.abilities, "parallel", 1) for handle in (self.source, self.target))
            with phase(self.options.progress, "copying", copied):
                packs = copy_extents(
                    self.source.store, self.target.store, units, relocate=self.source.relocate,
                    num_threads=current_limits().num_threads or max(default_threads(), *wanted),
                    progress=self.options.progress, throttle=self.throttle, on_pack=self.session.beat,
                )  # fmt: skip
            if nodes:
                ordered, hints = self.target.hints.copies(nodes, packs)
                packs.append(write_nodes(self.target.cached_store, ordered, hints=hints))
            self.target.add_written(packs, nodes, generation=generation)
        num_bytes = copied + sum(len(node.data) for node in nodes)
        self.report = replace(
            self.report,
            num_nodes=self.report.num_nodes + len(nodes),
            num_chunks=self.report.num_chunks + len(extents),
            num_bytes=self.report.num_bytes + num_bytes,
            num_packs=self.report.num_packs + len(packs),
        )


def _is_settled(update: RefUpdate, ref: Ref | None) -> bool:
    """Whether the ref names the commit already, and says of it what it is to say."""
    if ref is None or ref.target != update.target:
        return False
    return update.note in (None, ref.note) and update.signature in (None, ref.signature)


def _how(graph: Graph, kind: RefKind, old: Digest | None, new: Digest | None) -> Moved:
    if old == new:
        return Moved.SAME
    if new is None:
        return Moved.DELETED
    if old is None:
        return Moved.NEW
    if kind in (RefKind.BRANCH, RefKind.REMOTE) and old in graph.reached([new]):
        return Moved.FORWARD
    return Moved.FORCED


def _near(graph: Graph, tips: Iterable[bytes], depth: int) -> set[bytes]:
    """The tips, and what they lead to in fewer than `depth` steps."""
    found = level = set(tips)
    for _ in range(depth - 1):
        level = graph.parents(one for one in level if one in graph) - found
        if not level:
            break
        found = found | level
    return found


def _on_first_line(graph: Graph, old: Digest | None, new: Digest) -> bool:
    """Whether first parents lead from `new` to `old`."""
    at: bytes | None = new
    while at is not None and at != old:
        commit = graph.commits.get(at)
        at = commit.parents[0] if commit is not None and commit.parents else None
    return at is not None


def hex_of(digest: Digest | None) -> str | None:
    """The digest in hexadecimal digits, as reports have it; None where there is none."""
    return None if digest is None else digest.hex()
