"""`Repository`: the one class that people use; here is how one is made, opened and closed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Literal, Self

from cas_ckpt.arguments import reads_arguments
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import Head
from cas_ckpt.errors import InvalidInputError
from cas_ckpt.ops.commit.options import CommitOptions
from cas_ckpt.parallel.peers import Call, Peers
from cas_ckpt.progress import Progress, shown
from cas_ckpt.repository.contents import ContentVerbs
from cas_ckpt.repository.given import Encoding, ProcessGroup, Trusted, given_trust, texts
from cas_ckpt.repository.history import HistoryVerbs
from cas_ckpt.repository.names import NameVerbs
from cas_ckpt.repository.plans import PlanVerbs
from cas_ckpt.repository.ranks import AUTO, TIMEOUT_S, Ranks
from cas_ckpt.repository.remotes import RemoteVerbs
from cas_ckpt.repository.signatures import SignatureVerbs
from cas_ckpt.repository.states import StateVerbs
from cas_ckpt.repository.upkeep import UpkeepVerbs
from cas_ckpt.repository.usage import UsageVerbs


@reads_arguments
class Repository(
    StateVerbs, ContentVerbs, HistoryVerbs, NameVerbs, RemoteVerbs, SignatureVerbs, PlanVerbs, UsageVerbs, UpkeepVerbs
):
    """An open repository.

    A revision is what people write for a commit: a branch or tag, at least four digits of an
    id, `HEAD` (what was checked out; of a fresh object the default branch), `step:3000`, with
    `~N` (N first parents back) or `^N` (N-th parent) behind it; a `CommitInfo` will do as well.
    Every method raises only `CkptError`s; in general `NotFoundError` for revisions and keys that
    are not there, `CorruptionError` for stored bytes that are not what was written,
    `StorageError` when the medium refuses. The methods below name what comes on top.

    An object follows one live state: `head` says where it came from, and `commit` goes on from there. Open
    another one for another state.

    `progress=True`: bytes, rate and time left, as a bar on a terminal, else as lines in the log `cas_ckpt` (INFO)
    or, where no log takes them, on standard error; or an object of your own with the methods of `Progress`.

    Threads may share an object; commits made through one object run one after another.
    Use it as a context manager, or call `close`.
    """

    @classmethod
    def init(
        cls,
        url: str | PathLike[str],
        *,
        default_branch: str = "main",
        encoding: Encoding | None = None,
        pack_bytes: int | None = None,
        single_writer: bool = False,
        index_url: str | None = None,
        cache: str | PathLike[str] | None = AUTO,
        group: ProcessGroup | Peers | Literal["auto"] | None = "auto",
        timeout_s: float = TIMEOUT_S,
    ) -> Repository:
        """A new repository at `url`, opened. In a distributed job all ranks call it together.

        Args:
            url: A path or a URL, e.g. `s3://bucket/prefix`. A folder must be empty, or not there yet.
            default_branch: The branch that commits go to unless they say otherwise.
            encoding: How new chunks are stored ("raw", "zstd", ...); ids do not depend on it. None: "auto", and
                "planes" on object storage.
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
        return cls(handle, ranks=ranks)

    @classmethod
    def open(
        cls,
        url: str | PathLike[str],
        *,
        create: bool = False,
        index_url: str | None = None,
        read_only: bool | None = False,
        cache: str | PathLike[str] | None = AUTO,
        group: ProcessGroup | Peers | Literal["auto"] | None = "auto",
        timeout_s: float = TIMEOUT_S,
        progress: Progress | bool = False,
        trust: Trusted | None = None,
        commit_options: CommitOptions | None = None,
    ) -> Repository:
        """The repository at `url`.

        Args:
            index_url: Where the index is, if not inside the repository: a path, or a URL of
                SQLAlchemy (e.g. of a PostgreSQL that a team shares).
            create: Make an empty one if there is none. In a distributed job all ranks call it together then.
            read_only: Write nothing, not even the index. None: where nothing may be written, as it is.
            cache: A folder where this host keeps what it has read of repositories on stores that are not local, so
                that the next look costs few requests; processes share it. "auto": `~/.cache/cas_ckpt`. None: nowhere,
                the index is in memory then. It holds too for remotes that are pushed to and fetched from.
            group: The ranks that commit and check out together: by itself all ranks of
                torch.distributed, where that is initialised. A ProcessGroup, a `Peers`, or
                None: this process alone.
            timeout_s: How long a rank waits for the others before it raises PeerError.
            progress: Of what an index of an older version lacks, which the first question that needs it reads.
            trust: Whose signature a commit needs before `checkout`, `load`, `read` and `export` give its state: the
                path of an allowed_signers file, public keys, or a `Trust`. See `verify`.
            commit_options: What commits say and how they are made where a call has no `options`; the attribute
                `commit_options` of the object, which may be changed.
        Raises:
            NoRepositoryError: there is none. UnsupportedVersionError: of a newer format.
            InvalidInputError: `create` and `read_only` together.
            PermissionDeniedError: it may not be written, and `read_only` is False.
            CorruptionError: the config is damaged, or the index is: `rebuild_index` makes it anew.
        """
        from cas_ckpt.core.create import open_allowed, open_or_init, require_rights

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
        return cls(handle, ranks=ranks, commit_options=commit_options)

    @classmethod
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
    ) -> Repository:
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
            ConflictError: something else is at `target`. NoRepositoryError: there is none at `url`.
            NotFoundError: there is no such branch. InvalidInputError: several may be meant.
        """
        from cas_ckpt.ops.sync.fetch import FetchRequest, clone

        if depth is not None and depth < 1:
            raise InvalidInputError(f"depth is {depth}: give a number from 1 on")
        request = FetchRequest(
            branches=texts(branches), tags=tags, max_bandwidth=max_bandwidth, progress=shown(progress), depth=depth,
            filter=texts(filter),
        )  # fmt: skip
        handle, _ = clone(url, target, request, branch=branch, cache=cache)
        return cls(handle)

    def close(self) -> None:
        """Wait for pending commits, and for what `push_to=` left to be pushed; then release files and connections.

        Idempotent. An interrupt (Ctrl-C) ends the wait alone: what is pending goes on, and nothing is released, until
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
    def one_look(self) -> Iterator[Repository]:
        """Inside the block, branches, tags and pins that are only looked at are all of one moment.

        That is the moment of the first look, and on a store that is not local it takes one request for all of them.
        Commits see what is there now, as always. For this thread alone.
        """
        with self._handle.refs.one_look():
            yield self
