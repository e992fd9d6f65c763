"""What has a state: the protocol, and a dict that is one.

Knows nothing of commits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state as a mapping and takes it back: modules, optimizers, loaders, ..."""

    def state_dict(self) -> Any:
        """The state; its tensors may be the live ones. Must change nothing that matters."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take over a state that `state_dict` gave, here or in another process."""
        ...


def is_stateful(value: Any) -> TypeGuard[Stateful]:
    """Whether `value` is an object (not a class) with both methods."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class StateDict(dict[str, Any]):
    """A dict that is Stateful: for progress counters, histories, loose tensors.

        progress = StateDict(step=0, best=None)

    A checkout makes its content exactly that of the commit, in place: the same dict object,
    and the same tensor objects where specs agree.
    """

    def state_dict(self) -> dict[str, Any]:
        """The content as a plain dict; values are the live ones."""
        return dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hold exactly what `state_dict` holds."""
        content = dict(state_dict)
        self.clear()
        self.update(content)
