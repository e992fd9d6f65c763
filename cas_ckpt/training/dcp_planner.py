"""DCP's own planners with what its flat form loses: optional, stock planners work as well.

Invariant: plans are those of DCP; only the structure of the state is looked at more closely.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import ReadItem


class CasSavePlanner(DefaultSavePlanner):
    """DCP's own planner, which also remembers the state as it was before it was flattened.

    With it a commit is exactly that of `repo.commit` for every state: OrderedDicts, numbers as
    keys and empty dicts, of which DCP's flat form keeps no trace.
    """

    nested_state_dict: dict[str, Any] | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """See `SavePlanner.set_up_planner`."""
        self.nested_state_dict = dict(state_dict)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


class CasLoadPlanner(DefaultLoadPlanner):
    """DCP's own planner, which puts plain values back under the very keys that the state has.

    DCP itself would put the value of `{1: "one"}` under "1", beside the old one.
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See `LoadPlanner.load_bytes`."""
        name = read_item.dest_index.fqn
        holder = DefaultLoadPlanner(flatten_state_dict=False)
        holder.state_dict = {}
        holder.load_bytes(read_item, value)
        at: Any = self.original_state_dict
        path = self.mappings[name] if self.flatten_state_dict else (name,)
        for part in path[:-1]:
            at = at[_own_key(at, part)]
        at[_own_key(at, path[-1])] = holder.state_dict[name]


def _own_key(container: Any, part: str | int) -> Any:
    """The key of `container` that DCP writes as `part`."""
    if not isinstance(container, Mapping) or part in container:
        return part
    return next((key for key in container if str(key) == part), part)
