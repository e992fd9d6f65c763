"""How a commit would be restored into other ranks, and how it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cas_ckpt.arguments import reads_arguments
from cas_ckpt.repository.opened import Opened

if TYPE_CHECKING:
    from cas_ckpt.core.revisions import Revision
    from cas_ckpt.layout.target_layout import TargetLayout
    from cas_ckpt.ops.checkout.plan import PlanReport
    from cas_ckpt.ops.checkout.restores import RestoreInfo


@reads_arguments
class PlanVerbs(Opened):
    """How a commit would be restored into other ranks, and how it was."""

    def plan(
        self,
        ref: Revision,
        target: str | int | TargetLayout,
        *,
        shapes: Mapping[str, Sequence[str]] | None = None,
        storage_bandwidth: float | None = None,
        network_bandwidth: float | None = None,
    ) -> PlanReport:
        """How `ref` would be restored into ranks that need not exist: exact, checked, kept in the index.

        Args:
            target: A mesh such as "dp=96,tp=8" (the last dimension fastest), or a number of ranks
                that shard dimension 0. Not collective.
            shapes: Pattern of keys -> one placement per mesh dimension ("S(0)", "R", "SS(0,8)"),
                where the usual ones are not meant.
            storage_bandwidth, network_bandwidth: Bytes per second and rank, for the estimates; what
                layout/plan_summary.py assumes, if not given.
        Raises:
            MismatchError: the commit cannot fill the target; names key and region.
        """
        from cas_ckpt.layout.target_layout import layout_of
        from cas_ckpt.ops.checkout.plan import plan_checkout

        return plan_checkout(
            self._handle, ref, layout_of(target, shapes), storage_bandwidth=storage_bandwidth,
            network_bandwidth=network_bandwidth,
        )  # fmt: skip

    def compare_plans(
        self,
        ref: Revision,
        targets: Sequence[str | int | TargetLayout] | None = None,
        *,
        shapes: Mapping[str, Sequence[str]] | None = None,
        most_ranks: int | None = None,
        storage_bandwidth: float | None = None,
        network_bandwidth: float | None = None,
    ) -> list[PlanReport]:
        """How `ref` would be restored into each of several targets, the one that takes the least time first.

        Args:
            targets: As for `plan`, which is done for those that have no plan yet. None: those that have one.
            most_ranks: Leave out targets of more ranks: which mesh that fits 384 GPUs restores this commit cheapest?
            shapes, storage_bandwidth, network_bandwidth: See `plan`.
        Raises:
            NotFoundError: nothing is left to compare.
            MismatchError: the commit cannot fill a target; names key and region.
        """
        from cas_ckpt.layout.target_layout import layout_of
        from cas_ckpt.ops.checkout.plan import compare_plans

        layouts = None if targets is None else [layout_of(target, shapes) for target in targets]
        return compare_plans(
            self._handle, ref, layouts, most_ranks=most_ranks, storage_bandwidth=storage_bandwidth,
            network_bandwidth=network_bandwidth,
        )  # fmt: skip

    def plans(self, ref: Revision | None = None) -> list[PlanReport]:
        """The plans that the index keeps, for one revision or all."""
        from cas_ckpt.ops.checkout.plan import kept_plans

        return kept_plans(self._handle, ref)

    def restores(self, ref: Revision | None = None, *, limit: int | None = None) -> list[RestoreInfo]:
        """The checkouts and loads that were made, well or badly, the last one first; of one revision's state, or all.

        Logged in the index, by rank 0, where that can be written; beside each what a kept plan says of it.
        """
        from cas_ckpt.ops.checkout.restores import list_restores

        return list_restores(self._handle, ref, limit=limit)
