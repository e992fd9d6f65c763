"""Plays one schedule: actors with something to do, in a world, in the order of a decider.

An actor's deed is a short text ("commit ab main"), so that a schedule is three lines that can be
printed, kept and played again. After the last turn everybody who is still at work has died. Then
one collection in quiet must leave exactly what refs lead to, and every commit reads back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

from cas_ckpt import limits
from cas_ckpt.core.config import Config
from cas_ckpt.core.create import write_config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import GcPhase, read_gc_state
from cas_ckpt.core.publish import publish_lost_ref
from cas_ckpt.core.refs import RefKind, new_move
from cas_ckpt.core.units import PackShard
from cas_ckpt.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    PeerError,
    TransientStorageError,
)
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.refs import create_branch, create_pin, create_tag, delete_branch, rename_ref, undelete_ref
from cas_ckpt.ops.retention.forget import forget_revisions
from cas_ckpt.ops.sync.send import RefUpdate, SendOptions, send
from cas_ckpt.storage.store import Store
from tests.schedule.deciders import shortened
from tests.schedule.gate import GatedStore
from tests.schedule.peers import ScheduledPeers
from tests.schedule.plain_index import PlainIndex, rebuilt
from tests.schedule.scheduler import Decider, Request, Scheduler, Turn
from tests.schedule.soundness import LossError, Shelf, Soundness
from tests.schedule.world import IndexPool, World, commit, fixed_chance, read_back, shared_index, world

_READS = frozenset({"begin", "get", "get_range", "get_tail", "read_into", "head", "list"})

Deed = Callable[[RepositoryHandle, World, list[str]], object]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Who does what, where.

    Attributes:
        deeds: Name of an actor -> what it does, see `DEEDS`.
        sql: Indexes are the real ones, not plain dicts.
        shares_index: All actors are processes of one machine, with one index (in SQL: one file).
        paged: Listings come key by key, so that they are of no one moment.
        keeps_reflog: Collections keep what refs named before.
    """

    world: str
    deeds: Mapping[str, str]
    sql: bool = False
    shares_index: bool = False
    paged: bool = False
    keeps_reflog: bool = False

    def __str__(self) -> str:
        flags = [name for name in ("sql", "shares_index", "paged", "keeps_reflog") if getattr(self, name)]
        return "; ".join([" ".join([self.world, *flags]), *(f"{name}={deed}" for name, deed in self.deeds.items())])

    @staticmethod
    def parse(text: str) -> Scenario:
        head, *deeds = text.split("; ")
        place, *flags = head.split()
        return Scenario(place, dict(deed.split("=", 1) for deed in deeds), **dict.fromkeys(flags, True))


class UnexpectedError(AssertionError):
    """An actor was told something that must not happen, whatever the others do."""


@dataclass(slots=True)
class Played:
    """What came of a schedule.

    Attributes:
        before_quiet: The store as the actors left it.
        errors: Name of an actor -> what it was told; none for those that succeeded, or stalled.
        failure: The loss, or the unexpected error; None if all is well.
    """

    scenario: Scenario
    seed: int
    turns: list[Turn]
    story: str
    shelf: Shelf
    before_quiet: Shelf = field(default_factory=Shelf)
    ended: set[str] = field(default_factory=set)
    errors: dict[str, BaseException] = field(default_factory=dict)
    results: dict[str, object] = field(default_factory=dict)
    failure: BaseException | None = None

    def __str__(self) -> str:
        return (
            f"{self.failure!r}\nscenario: {self.scenario}\nseed: {self.seed}\nturns: {shortened(self.turns)}\n"
            f"{self.story}\nagain: python -m tests.schedule.explore --scenario '{self.scenario}' "
            f"--seed {self.seed} --turns '{shortened(self.turns)}'"
        )


def play(scenario: Scenario, decider: Decider, *, seed: int = 0, to_the_end: bool = True) -> Played:
    """One schedule; never raises for what it finds.

    Args:
        seed: Of names and nonces.
        to_the_end: Collect in quiet afterwards, and read every commit back.
    """
    place = world(scenario.world)
    shelf = place.shelf.copy()
    soundness = Soundness(shelf, keeps_reflog=scenario.keeps_reflog)

    def check(request: Request) -> None:
        if request.name not in _READS:
            soundness.check()

    scheduler = Scheduler(decider, check=check)
    with fixed_chance(seed), _processes(scenario, place) as opened:
        for name, deed in scenario.deeds.items():
            store = GatedStore(shelf, scheduler, name, paged=scenario.paged)
            scheduler.add(name, _work(place, deed, lambda store=store: opened(store)))  # type: ignore[misc]
        played = Played(scenario, seed, [], "", shelf)
        try:
            scheduler.run()
        except AssertionError as failure:
            played.failure = failure
        played.turns, played.story = scheduler.turns, scheduler.story()
        for name in scenario.deeds:
            played.results[name] = scheduler.result(name)
            if scheduler.ended(name):
                played.ended.add(name)
            if (error := scheduler.error(name)) is not None:
                played.errors[name] = error
        try:
            played.before_quiet = shelf.copy()
            _judge(played, soundness)
            if to_the_end and played.failure is None:
                _end_in_quiet(played, opened(shelf))
        except Exception as failure:  # noqa: BLE001 - told with the schedule
            played.failure = failure
    return played


@contextmanager
def _processes(scenario: Scenario, place: World) -> Iterator[Callable[[Store], RepositoryHandle]]:
    """Opens the repository in a store as one more process does."""
    with ExitStack() as stack:
        if not scenario.sql:
            shared = place.plain.copy()
            yield (
                lambda store: (
                    RepositoryHandle(store, place.config, shared)  # type: ignore[arg-type]
                    if scenario.shares_index
                    else place.process(store)
                )
            )
        elif scenario.shares_index:
            opened = stack.enter_context(shared_index(place))
            yield lambda store: RepositoryHandle(store, place.config, opened())
        else:
            indexes = stack.enter_context(IndexPool())
            yield lambda store: place.process(store, indexes)


def _work(place: World, deed: str, opened: Callable[[], RepositoryHandle]) -> Callable[[], object]:
    verb, *words = deed.split()
    return lambda: DEEDS[verb](opened(), place, words)


def _judge(played: Played, soundness: Soundness) -> None:
    """What actors were told must be true, and nothing that they cannot help."""
    scenario = played.scenario
    for name, error in played.errors.items():
        if not _may_be_told(scenario, scenario.deeds[name], error, played.turns):
            raise UnexpectedError(f"{name} was told {error!r}") from error
    moved = any(deed.startswith("delete") or deed.endswith("force") for deed in scenario.deeds.values())
    history = soundness.history()
    for name, deed in scenario.deeds.items():
        made = played.results[name]
        lost = isinstance(made, str) and Digest(bytes.fromhex(made)) not in history
        if deed.startswith(("commit", "merge", "push", "rank")) and lost and not moved and played.failure is None:
            raise LossError(f"{name} was told that its commit {made} is made, and no ref leads to it")


def _may_be_told(scenario: Scenario, deed: str, error: BaseException, turns: Sequence[Turn]) -> bool:
    if isinstance(error, TransientStorageError):
        return any(turn.fault is not None for turn in turns)
    if isinstance(error, CorruptionError):  # it sees an index that is being filled again, or a lost ref: does nothing
        rebuilt = scenario.shares_index and "rebuild" in scenario.deeds.values()
        lost = [each.split()[1] for each in scenario.deeds.values() if each.startswith("name ")]
        named = any(f"refs/heads/{name}.ref is gone" in str(error) for name in lost)
        return deed.startswith("gc") and (rebuilt or named)
    if isinstance(error, PeerError):
        return deed.startswith("rank")
    return isinstance(error, (ConflictError, NotFoundError))


def _end_in_quiet(played: Played, handle: RepositoryHandle) -> None:
    """Whoever is still at work died. Collect, and look at what is left."""
    collect_in_quiet(handle)
    soundness = Soundness(played.shelf)
    soundness.check()
    left = soundness.unreachable()
    if left:
        names = ", ".join(sorted(digest.hex()[:8] for digest in left))
        raise LossError(f"after a collection in quiet there still is what no ref leads to: {names}")
    if read_gc_state(played.shelf).phase != GcPhase.IDLE:
        raise LossError("a collection in quiet left gc/state in the middle of a cycle")
    for digest in soundness.history().keys() - soundness.forgotten():
        read_back(handle, digest)


# --- what actors do --------------------------------------------------------------------------------


def collect_in_quiet(handle: RepositoryHandle) -> None:
    """Garbage collection that spares nothing for being young or having been named, and leaves no waste."""
    collect_garbage(handle, GcOptions(min_age_s=0.0, reflog_expire_s=0.0, max_unused=0.0))


def _commit(handle: RepositoryHandle, place: World, words: list[str]) -> str:
    """commit TEXT[,TEXT...] [BRANCH]: one after the other, by one process."""
    branch = words[1] if len(words) > 1 else "main"
    made = ""
    for text in words[0].split(","):
        made = commit(handle, text, branch)
    return made


def _merge(handle: RepositoryHandle, place: World, words: list[str]) -> str:
    """merge TEXT BRANCH OTHER: a commit that follows the commit OTHER of the world, too."""
    return commit(handle, words[0], words[1], other_parents=[Digest(bytes.fromhex(place.ids[words[2]]))])


def _rank(handle: RepositoryHandle, place: World, words: list[str]) -> str:
    """rank NUMBER OF TEXT [BRANCH]: one of several that make a commit together; all have the same state."""
    assert isinstance(handle.store, GatedStore)
    peers = ScheduledPeers(handle.store.scheduler, handle.store.name, int(words[0]), int(words[1]))
    return commit(handle, words[2], *words[3:4], peers=peers)


def _branch(handle: RepositoryHandle, place: World, words: list[str]) -> Digest:
    """branch NAME COMMIT [force]"""
    return create_branch(handle, words[0], start=place.ids[words[1]], force="force" in words)


def _name(handle: RepositoryHandle, place: World, words: list[str]) -> object:
    """name BRANCH COMMIT: what a repair does for a branch that was lost."""
    target = Digest(bytes.fromhex(place.ids[words[1]]))
    move = new_move(None, target, "repaired", "tests")
    return publish_lost_ref(handle, RefKind.BRANCH, words[0], target, move=move)


def _tag(handle: RepositoryHandle, place: World, words: list[str]) -> Digest:
    """tag NAME COMMIT [force]"""
    return create_tag(handle, words[0], place.ids[words[1]], force="force" in words)


def _delete(handle: RepositoryHandle, place: World, words: list[str]) -> Digest:
    """delete BRANCH"""
    return delete_branch(handle, words[0], force=True)


def _rename(handle: RepositoryHandle, place: World, words: list[str]) -> Digest:
    """rename BRANCH NAME"""
    return rename_ref(handle, RefKind.BRANCH, words[0], words[1])


def _undelete(handle: RepositoryHandle, place: World, words: list[str]) -> Digest:
    """undelete BRANCH"""
    return undelete_ref(handle, RefKind.BRANCH, words[0])


def _pin(handle: RepositoryHandle, place: World, words: list[str]) -> object:
    """pin NAME COMMIT [force]"""
    return create_pin(handle, place.ids[words[1]], name=words[0], force="force" in words)


def _forget(handle: RepositoryHandle, place: World, words: list[str]) -> object:
    """forget COMMIT: unless a ref names it at this moment."""
    with suppress(InvalidInputError):
        return forget_revisions(handle, [place.ids[words[0]]])
    return None


def _read(handle: RepositoryHandle, place: World, words: list[str]) -> None:
    """read BRANCH: what it names at this moment, bit for bit, or NotFoundError."""
    target = handle.refs.get(RefKind.BRANCH, words[0]).target
    if target is not None:
        read_back(handle, target)


def _rebuild(handle: RepositoryHandle, place: World, words: list[str]) -> None:
    """rebuild: the index anew, in place."""
    rebuilt(handle)


def _gc(handle: RepositoryHandle, place: World, words: list[str]) -> None:
    """gc [repack] [lazy] [keep] [IofN]: copy sparse packs, spare young ones, respect the reflog; one shard of packs."""
    shards = [PackShard(*map(int, word.split("of"))) for word in words if "of" in word]
    options = GcOptions(
        min_age_s=600.0 if "lazy" in words else 0.0,
        reflog_expire_s=86400.0 if "keep" in words else 0.0,
        max_unused=0.0 if "repack" in words else 1.0,
        many_small=3 if "small" in words else 64,
        shard=shards[0] if shards else None,
    )
    collect_garbage(handle, options)


def _push(handle: RepositoryHandle, place: World, words: list[str]) -> str:
    """push TEXT[,TEXT...] [BRANCH] [force] [over COMMIT]: commits of a copy of the world, as it was, come here.

    The last of them also follows COMMIT of the world.

    The other way round it is a pull: what is here is what is written.
    """
    branch = next((word for word in words[1:] if word not in ("force", "over")), "main")
    source = place.process(place.shelf.copy())
    made = ""
    others = [Digest(bytes.fromhex(place.ids[words[-1]]))] if "over" in words else []
    for text in words[0].split(","):
        made = commit(source, text, branch, other_parents=others)
    update = RefUpdate(RefKind.BRANCH, branch, Digest(bytes.fromhex(made)), force="force" in words)
    with limits(num_threads=1):
        send(source, handle, [update], SendOptions("push"), near=source)
    return made


def _clone(handle: RepositoryHandle, place: World, words: list[str]) -> None:
    """clone BRANCH: what it leads to goes into an empty repository, where all of it must be whole then."""
    target = handle.refs.get(RefKind.BRANCH, words[0]).target
    if target is None:
        return
    shelf, config = Shelf(), Config("1" * 32)
    write_config(shelf, config)
    made = RepositoryHandle(shelf, config, PlainIndex(config.store_id))  # type: ignore[arg-type]
    handle.sync()
    with limits(num_threads=1):
        send(handle, made, [RefUpdate(RefKind.BRANCH, words[0], target)], SendOptions("clone"), near=made)
    soundness = Soundness(shelf)
    soundness.check()
    for digest in soundness.history().keys() - soundness.forgotten():
        read_back(made, digest)


DEEDS: dict[str, Deed] = {
    "branch": _branch, "commit": _commit, "delete": _delete, "forget": _forget, "gc": _gc, "merge": _merge,
    "name": _name, "pin": _pin, "rank": _rank, "read": _read, "rebuild": _rebuild, "rename": _rename, "tag": _tag,
    "push": _push, "clone": _clone, "undelete": _undelete,
}  # fmt: skip
