"""An open repository without verbs: how one is made, opened and closed, and the ranks that it works together with."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from cas_ckpt import clock
from cas_ckpt.arguments import ProcessGroup, check_flags, check_real, check_whole, optional_flag, texts
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import Head
from cas_ckpt.errors import InvalidInputError, shown_value
from cas_ckpt.events import load_handlers, reported
from cas_ckpt.held_signals import Turn
from cas_ckpt.ops.commit.options import CommitOptions
from cas_ckpt.parallel.peers import SOLO, Call, Peers, collective_errors, compare_calls
from cas_ckpt.progress import Progress, shown
from cas_ckpt.uncopied import Uncopied

if TYPE_CHECKING:
    from cas_ckpt.objects.codec import EncodingPolicy
    from cas_ckpt.ops.commit.frozen import FrozenMemory
    from cas_ckpt.ops.sync.push import BackgroundPushes
    from cas_ckpt.signing import KeyFile, Trust, Trusted
    from cas_ckpt.training.background.commits import BackgroundCommits, InFlight

AUTO: Literal["auto"] = "auto"
"""All ranks of torch.distributed where that is initialised, else this process alone."""

TIMEOUT_S = 300.0

Group: TypeAlias = ProcessGroup | Peers | Literal["auto"] | None
"""The ranks that commit and check out together; None: this process alone."""


def given_key(given: KeyFile | None) -> str | None:
    """The absolute path of the key that `sign=` gives; None stays None.

    Raises:
        InvalidInputError: no path. StorageError: its file cannot be read.
    """
    if given is None:
        return None
    from cas_ckpt.signing import key_path

    return key_path(given)


def given_trust(given: Trusted | None) -> Trust | None:
    """`given` as a `Trust`; None stays None.

    Raises:
        InvalidInputError: a line that is not understood. StorageError: a file cannot be read.
    """
    if given is None:
        return None
    from cas_ckpt.signing import as_trust

    return as_trust(given)


class Ranks:
    """This process and those that it commits and checks out with."""

    def __init__(self, group: Group, timeout_s: float) -> None:
        if not check_real("timeout_s", timeout_s) > 0:
            raise InvalidInputError(f"timeout_s is {timeout_s!r}: give the seconds that a rank waits for the others")
        # A ProcessGroup is known by the name of its class: torch is not imported for it.
        is_group = hasattr(group, "gather_all") or any(each.__name__ == "ProcessGroup" for each in type(group).__mro__)
        if not (group is None or (isinstance(group, str) and group == AUTO) or is_group):
            raise InvalidInputError(f"group is {shown_value(group)}: give {AUTO!r}, None, a ProcessGroup or Peers")
        self.group: Any = group
        self._timeout_s = timeout_s
        self._own: Peers | None = None
        self._own_background: Peers | None = None
        self.num_neighbours = 1  # ranks on this machine, as far as `background` has asked
        self._closed = False

    @property
    def peers(self) -> Peers:
        """The ranks; making the group, the first time, is collective."""
        if self._closed:
            raise InvalidInputError("this repository was closed: open it again")
        if self.group is None:
            return SOLO
        if hasattr(self.group, "gather_all"):
            found: Peers = self.group
            return found
        if self._own is None:
            distributed = sys.modules.get("torch.distributed")
            is_named = isinstance(self.group, str)
            if distributed is None or (is_named and not (distributed.is_available() and distributed.is_initialized())):
                return SOLO  # for now: it may still be initialised
            if is_named and distributed.get_world_size() == 1:
                return SOLO
            from cas_ckpt.training.process_group import GroupPeers

            self._own = GroupPeers(None if is_named else self.group, timeout_s=self._timeout_s)
        return self._own

    def together(self) -> AbstractContextManager[None]:
        """Common work: what is raised inside makes all ranks raise (`collective_errors`)."""
        peers = self.peers
        return nullcontext() if peers is SOLO else collective_errors(peers)

    @property
    def background(self) -> Peers:
        """The same ranks over connections of their own, for commits in the background; collective the first time.

        `Peers` that were given are these, too: then no other work of theirs may run meanwhile.
        """
        peers = self.peers
        if self._own is None:
            return peers
        if self._own_background is None:
            from cas_ckpt.training.process_group import GroupPeers

            named = None if isinstance(self.group, str) else self.group
            made = GroupPeers(named, timeout_s=self._timeout_s)
            try:
                hosts = made.gather_all(socket.gethostname().encode())
            except BaseException:
                made.close()
                raise
            self._own_background, self.num_neighbours = made, hosts.count(hosts[made.rank])
        return self._own_background

    def open_in_turn(
        self, call: Call, first: Callable[[], RepositoryHandle], others: Callable[[], RepositoryHandle]
    ) -> RepositoryHandle:
        """Open by `first` on rank 0 and then by `others` on the other ranks. Collective.

        Args:
            call: What this is done for; all ranks must say the same.

        A rank that cannot makes all ranks raise before any of them goes on; what was opened is closed.
        """
        peers = self.peers
        made: RepositoryHandle | None = None
        try:
            with collective_errors(peers):
                compare_calls(peers, call)
                if peers.rank == 0:
                    made = first()
                peers.broadcast(b"" if peers.rank == 0 else None)
                made = made or others()
                peers.gather_all(b"")
        except BaseException:
            if made is not None:
                made.close()
            raise
        return made

    def close(self) -> None:
        """Leave the group that was made here; no work together is begun any more. Idempotent."""
        self._closed = True
        for own in (self._own_background, self._own):
            if own is not None:
                own.close()
        self._own = self._own_background = None


class Opened(Uncopied):
    """An open repository, without verbs."""

    def __init__(
        self, handle: RepositoryHandle, ranks: Ranks | None = None, commit_options: CommitOptions | None = None
    ) -> None:
        """Take over `handle` and `ranks`; people call `init`, `open` or `clone`."""
        self._handle = handle
        self._ranks = ranks or Ranks(AUTO, TIMEOUT_S)
        self.commit_options = commit_options or CommitOptions()
        self._frozen: FrozenMemory | None = None
        self._pushes: BackgroundPushes | None = None
        self._background: BackgroundCommits | None = None
        self._others: list[InFlight] = []
        self._pid, self._committing = os.getpid(), Turn()
        if "torch" in sys.modules:  # who trains opens once, and is not to wait for modules in the first commit
            import cas_ckpt.training.verbs  # noqa: F401

            load_handlers()

    @classmethod
    def init(
        cls,
        url: str | PathLike[str],
        *,
        default_branch: str = "main",
        encoding: EncodingPolicy | str | None = None,
        pack_bytes: int | None = None,
        single_writer: bool = False,
        index_url: str | None = None,
        cache: str | PathLike[str] | None = AUTO,
        group: Group = "auto",
        timeout_s: float = TIMEOUT_S,
    ) -> Self:
        """A new repository at `url`, opened. In a distributed job all ranks call it together.

        Args:
            url: A path or a URL, e.g. `s3://bucket/prefix`. A folder must be empty, or not there yet.
            default_branch: The branch that commits go to unless they say otherwise.
            encoding: How new chunks are stored ("raw", "zstd", "planes", "auto", or the name of an encoding that an
                installed package brings); ids do not depend on it. None: "auto", and "planes" on object storage.
            pack_bytes: Length at which a data pack is closed. None: 512 MiB, and 128 MiB on object storage.
            single_writer: An object storage that ignores conditional writes will do. You see to it that one process at
                a time writes (commits, collects, pushes); a second one would lose commits.
            index_url: As for `open`. The URL of a database without a password is noted in the repository, so that
                whoever opens it for writing need not give it.
            cache, group, timeout_s: See `open`.
        Raises:
            ConflictError: there is a repository, or something else, already.
            InvalidInputError: impossible settings.
            StorageError: the store ignores conditional writes, and `single_writer` is False.
            PeerError: another rank could not; raised on all ranks at once.
        """
        check_flags(single_writer=single_writer)
        from cas_ckpt.core.create import init_repository

        ranks = Ranks(group, timeout_s)
        given = {"encoding": encoding, "pack_bytes": pack_bytes, "single_writer": single_writer}
        try:
            handle = ranks.open_in_turn(
                Call("init", {"default_branch": default_branch, **given}),
                lambda: init_repository(
                    url,
                    default_branch=default_branch,
                    encoding=encoding,
                    pack_bytes=pack_bytes,
                    single_writer=single_writer,
                    index_url=index_url,
                    cache=cache,
                ),
                lambda: RepositoryHandle.open(url, index_url=index_url, cache=cache),
            )
        except BaseException:
            ranks.close()
            raise
        return cls(handle, ranks)

    @classmethod
    def open(
        cls,
        url: str | PathLike[str],
        *,
        create: bool = False,
        index_url: str | None = None,
        read_only: bool | None = False,
        cache: str | PathLike[str] | None = AUTO,
        group: Group = "auto",
        timeout_s: float = TIMEOUT_S,
        progress: Progress | bool = False,
        trust: Trusted | None = None,
        commit_options: CommitOptions | None = None,
    ) -> Self:
        """The repository at `url`.

        Args:
            index_url: Where the index is: a path, or `postgresql+psycopg://...` of a database that a team shares. None:
                the database that the repository's settings name, else inside the repository or in the cache.
            create: Make an empty one if there is none. In a distributed job all ranks call it together then.
            read_only: Write nothing, not even the index. None: decided by whether anything may be written.
            cache: A folder where this host keeps what it has read of repositories on stores that are not local, so
                that the next look costs few requests; processes share it. "auto": `~/.cache/cas_ckpt`. None: nowhere,
                the index is in memory then. It holds too for remotes that are pushed to and fetched from.
            group: The ranks that commit and check out together: by itself all ranks of
                torch.distributed, where that is initialised. A ProcessGroup, a `Peers`, or
                None: this process alone.
            timeout_s: How long a rank waits for the others before it raises PeerError.
            progress: Of the upgrade of an index that an older version made, which the first question that needs it
                waits for; and of what is brought from a remote because it is missing here.
            trust: Whose signature a commit needs before `checkout`, `load`, `read` and `export` give its state: the
                path of an allowed_signers file, public keys, or a `Trust`. See `verify`. None: they ask for none,
                but of branches that take signed commits only.
            commit_options: What commits say and how they are made where a call has no `options`; the attribute
                `commit_options` of the object, which may be changed.
        Raises:
            NoRepositoryError: there is none. UnsupportedVersionError: of a newer format.
            InvalidInputError: `create` and `read_only` together.
            PermissionDeniedError: it may not be written, and `read_only` is False.
            CorruptionError: the config is damaged, or the index is: `rebuild_index` makes it anew.
        """
        from cas_ckpt.core.create import open_allowed, open_or_init, require_rights

        check_flags(create=create)
        read_only = optional_flag("read_only", read_only)
        if create and read_only:
            raise InvalidInputError("create=True makes a repository, read_only=True writes nothing: give one of them")
        ranks, handle = Ranks(group, timeout_s), None
        try:
            if create:
                handle = ranks.open_in_turn(
                    Call("open", {"create": True}),
                    lambda: open_or_init(url, index_url=index_url, cache=cache),
                    lambda: RepositoryHandle.open(url, index_url=index_url, cache=cache),
                )  # fmt: skip
            else:
                handle = open_allowed(url, index_url=index_url, read_only=read_only, cache=cache)
            handle.progress, handle.trust = shown(progress), given_trust(trust)
            if read_only is False:
                require_rights(handle)
        except BaseException:
            if handle is not None:
                handle.close()
            ranks.close()
            raise
        return cls(handle, ranks, commit_options)

    @classmethod
    @reported
    def clone(
        cls,
        url: str | PathLike[str],
        target: str | PathLike[str],
        *,
        branch: str | None = None,
        branches: str | Sequence[str] = (),
        depth: int | None = None,
        filter: str | Sequence[str] = (),  # noqa: A002 - as git calls it
        tags: bool | None = None,
        max_bandwidth: float | None = None,
        cache: str | PathLike[str] | None = AUTO,
        progress: Progress | bool = False,
    ) -> Self:
        """A new repository at `target` with the commits of the one at `url`, which is its remote `origin`; opened.

        One that was broken off is gone on with. In a distributed job call it on one rank.

        Args:
            branch: The branch that begins here, the default branch here; if not given the default branch there or, if
                that has no commits, the only one.
            branches: Patterns of its branches that come ("ft/*"); all, if none is given.
            depth: Only so many commits on every way back from a head come with their data; of those before them the
                record alone, as of forgotten ones.
            filter: Patterns of keys ("model/**") whose chunks come; the others are promised by `origin`, and are
                brought from there when they are read. All, if none is given.
            tags: All (True), none (False), or those of commits that come.
            max_bandwidth: Bytes a second at most.
            cache: See `open`; of both.
        Raises:
            ConflictError: something else is at `target`, a finished clone too. NoRepositoryError: there is none at
            `url`.
            NotFoundError: there is no such branch. InvalidInputError: the default branch there has
            no commits, and several others have. Of the last three nothing is left at `target`.
        """
        from cas_ckpt.ops.sync.fetch import FetchRequest, clone

        if depth is not None:
            depth = check_whole("depth", depth, least=1)
        request = FetchRequest(
            branches=texts("branches", branches), tags=tags, max_bandwidth=max_bandwidth, progress=shown(progress),
            depth=depth, filter=texts("filter", filter),
        )  # fmt: skip
        handle, _ = clone(url, target, request, branch=branch, cache=cache)
        return cls(handle)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no commit is pending, nor a save of `dcp.async_save` to this object; whether none is.

        For a preempted job, before it ends. What a save of DCP fails of is logged, and raised by its own future.

        Args:
            timeout_s: Wait no longer than this.
        Raises:
            BackgroundCommitError: one failed, and its result was not read. InvalidInputError: in a callback, or in a
            signal handler that interrupted a commit.
        """
        self._refuse_inside("drain")
        deadline_s = None if timeout_s is None else clock.monotonic_s() + check_real("timeout_s", timeout_s)

        def left_s() -> float | None:
            return None if deadline_s is None else max(0.0, deadline_s - clock.monotonic_s())

        done = all(each.wait(left_s()) for each in self._in_flight())
        if self._background is None or self._background.queue.pid != os.getpid():
            return done
        done = self._background.queue.drain(left_s()) and done
        self._background.queue.raise_failure("It was not made: mend the cause, and commit again")
        return done

    def wait_pushed(self, timeout_s: float | None = None) -> bool:
        """Wait until what `commit(push_to=)` left to be pushed is pushed; whether it is.

        Args:
            timeout_s: Wait no longer than this, for all of them together.
        Raises:
            Whatever the last push to a remote raised; of several the first, after all have ended.
        """
        return self._pushes is None or self._pushes.wait(timeout_s)

    def close(self) -> None:
        """Wait for pending commits, and for what `push_to=` left to be pushed; then release files and connections.

        Idempotent; afterwards every verb is refused. `with Repository.open(url) as repo:` calls it; while an error is
        on its way out of the block it waits for commits, but not for pushes: the next process pushes what is missing
        there. An interrupt (Ctrl-C) ends the wait alone: what is pending goes on, and nothing is released, until
        `close` is called again or the interpreter ends, which waits for commits.

        Raises:
            BackgroundCommitError: a pending commit failed, and nobody has heard of it yet. Whatever the last push
            raised. All is released then, too, and the next process pushes what is missing there.
            InvalidInputError: in a callback of a pending commit, or in a signal handler that interrupted a commit or a
            checkout; nothing is released.
        """
        self._refuse_inside("close")
        if self._background is not None:
            self._background.queue.refuse_worker()
        try:
            try:
                self.drain()
            finally:
                self.wait_pushed()
        except Exception:
            self._release()
            raise
        self._release()

    def _release(self) -> None:
        if self._background is not None:
            self._background.close()
        self._ranks.close()
        self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc_info: object) -> None:
        if kind is None:
            self.close()
        else:
            for each in self._in_flight():
                each.wait()
            if self._background is not None:
                self._background.finish()  # what is staged is nowhere else; what it fails of is in the log
            self._release()  # nobody waits for a push while an error is on its way; the next process pushes it

    def __repr__(self) -> str:
        return f"Repository({self.url!r})"

    @property
    def url(self) -> str:
        """Where the repository is."""
        return self._handle.store.url

    @property
    def head(self) -> Head:
        """Where the live state came from, and where the next `commit` goes; the same on all ranks.

        `checkout` and `commit` move it; loading and reading do not. Checking out a part (`keys=`) is noted in `parts`,
        unless the parts of a commit are all of it, or nothing else is known of the state.
        """
        return self._handle.head

    @property
    def default_branch(self) -> str:
        """The branch that a fresh object is on."""
        return self._handle.default_branch

    @contextmanager
    def one_look(self) -> Iterator[Self]:
        """Inside the block, branches, tags and pins that are only looked at are all of one moment.

        That is the moment of the first look, and on a store that is not local it takes one request for all of them.
        Commits see what is there now, as always. For this thread alone.
        """
        with self._handle.refs.one_look():
            yield self

    # ------------------------------------------------------------ turns and ranks

    def _turn_for(self, verb: str) -> Turn:
        """The turn of a commit or checkout, once what is pending is made: to be entered as `with self._turn_for(...)`.

        The lock itself is what a `with` takes: behind its block no signal comes between it and its end.

        Raises:
            InvalidInputError: in a commit or checkout of this thread, which it would wait for.
        """
        self._refuse_inside(verb)
        try:
            self._wait_for_pending(*self._in_flight())
        except BaseException:
            with self._ranks.together():  # the others would wait for this rank
                raise
        return self._turn()

    def _refuse_inside(self, verb: str) -> None:
        """Refuse what would wait for a verb that this very thread is in: a signal handler calls it, or the state does.

        The locks say so, and no state beside them, which an interrupted call might leave behind.
        """
        if self._turn().is_mine or (self._background is not None and self._background.calls.is_mine):
            raise InvalidInputError(
                f"{verb} was called inside of a commit, import or checkout of the same repository, in the same thread, "
                "and would wait for it for ever: in a signal handler, note the signal, and call it after that"
            )

    def _turn(self) -> Turn:
        """No other commit or checkout through this object runs inside."""
        if self._pid != os.getpid():  # forked while a thread was inside, which is not here to leave it
            self._pid, self._committing = os.getpid(), Turn()
        return self._committing

    def _in_background(self) -> BackgroundCommits:
        """The commits in the background of this process."""
        if self._background is None or self._background.queue.pid != os.getpid():
            from cas_ckpt.training.background.commits import BackgroundCommits

            self._background = BackgroundCommits(self._handle, self._turn)
        return self._background

    def _note_in_flight(self, other: InFlight) -> None:
        """Order everything that begins from now on after `other`."""
        self._others = [*self._in_flight(), other]

    def _in_flight(self) -> list[InFlight]:
        """Pending work of others that this thread can wait for."""
        return [each for each in self._others if not each.wait(0)]

    def _wait_for_pending(self, *others: InFlight) -> None:
        """Commits in the background that were begun before, and `others`, come before what is begun now.

        A save of DCP waits, too, which is no work of this object's ranks: its failure is not reported here.
        """
        for each in others:
            each.wait()
        if self._background is not None and self._background.queue.pid == os.getpid():
            self._background.queue.drain()
