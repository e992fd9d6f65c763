"""`CommitOptions` and `ImportOptions`: what commits say and how they are made, beside what a call itself says.

Invariant: plain values that nobody has read yet; `checked_fields` in request.py refuses what cannot be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from cas_ckpt.arguments import FrozenCheck, OnConflict, OnDivergence, ReplicaCheck

if TYPE_CHECKING:
    from cas_ckpt.core.records import Lineage
    from cas_ckpt.core.revisions import Revision

DEFAULT_AUDIT = 0.01
"""Share of frozen chunks, and of what several ranks hold, that is compared by BLAKE3 on top of the checksums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOptions:
    """What a commit may say and how it is made, beside what the call itself says.

        options = CommitOptions(sign="~/.ssh/id_ed25519", provenance=True)
        repo = Repository.open("runs/ckpts", commit_options=options)   # for every commit of this object
        repo.commit(state, options=dataclasses.replace(options, orphan=True))   # in place of these, for one

    Attributes:
        create: The branch may be begun though its name is nearly that of another.
        orphan: The branch may be begun without a parent.
        came_from: The commit that the state came from, if no checkout through this object says so (`load`, a file,
            another object): the same as if it had been checked out.
        author: Who; "user@host" if not given.
        parents: Revisions that this state joins, parents after the head of its branch.
        lineage: What the state was made from otherwise, e.g. `Lineage("fine-tune-of", "base")`; a commit of another
            repository by its whole id.
        provenance: Keep command line, host, versions and the git commit of the working directory; and a mapping that
            is given. No environment variables.
        sign: The key that signs the commit: the path of a private key of SSH, or of the public key of one that an
            ssh-agent holds. In a distributed job rank 0 signs, and the others may leave it out.
        frozen_check: "checksum" compares every byte of what is `frozen` at each commit; "version" believes torch's
            version counter instead, behind which fused optimizers, `.data` and numpy write.
        frozen_audit: Share (0..1) of the frozen chunks, chosen at random, that is hashed all the same.
        on_conflict: "retry" goes on top of whatever others committed meanwhile, with a warning and a lineage if the
            state came from before that; "raise" does not.
        allow_pickle: Pickle values that cannot be expressed otherwise.
        replica_check: "checksum" compares every byte that several ranks hold before one of them writes it; "sample"
            only `replica_audit`.
        replica_audit: Share (0..1) of what several ranks hold that all of them hash to be compared; of each tensor at
            least one stretch of 128 KiB.
        on_divergence: "raise" if replicas differ; "warn" keeps one replica of each, and logs whose.
        staging_bytes: Of `commit_async`: memory that the staged states of the repository may take together, on this
            rank, and that it keeps for the next one. None: half of what is available, shared by the ranks of a machine.
            A state that is larger is saved in part while the call lasts: it returns as soon as the rest fits.
        max_in_flight: Of `commit_async`: commits that may be pending, this one included; the call waits until there
            are fewer.
    """

    create: bool = False
    orphan: bool = False
    came_from: Revision | None = None
    author: str | None = None
    parents: Sequence[Revision] = ()
    lineage: Sequence[Lineage] = ()
    provenance: bool | Mapping[str, Any] = False
    sign: str | PathLike[str] | None = None
    frozen_check: FrozenCheck = "checksum"
    frozen_audit: float = DEFAULT_AUDIT
    on_conflict: OnConflict = "retry"
    allow_pickle: bool = False
    replica_check: ReplicaCheck = "checksum"
    replica_audit: float = DEFAULT_AUDIT
    on_divergence: OnDivergence = "raise"
    staging_bytes: int | None = None
    max_in_flight: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions(CommitOptions):
    """How a file is committed: what `CommitOptions` say, and how it is read.

    Attributes:
        meta: A plain value that is kept with the commit.
        follow_links: Read what symbolic links in a folder lead to outside of it. Those of the Hugging Face hub's cache
            (`snapshots/*/` into `blobs/`) are followed anyway.
        adapter: What the live PeftModel calls the adapter that a folder of PEFT holds.
        keep_names: Name tensors as the files do. Else names are those of the live object: with the adapter's name,
            without the names of wrappers (`_orig_mod.`, `module.`).
    """

    meta: Any = None
    follow_links: bool = False
    adapter: str = "default"
    keep_names: bool = False
