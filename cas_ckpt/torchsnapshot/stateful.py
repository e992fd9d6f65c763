"""What an app state is made of: objects with a state, and `StateDict` for values that have none.

Invariant: `StateDict` behaves as torchsnapshot's; it is not `cas_ckpt.StateDict`, which a load empties first.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from cas_ckpt import RNGState
from cas_ckpt.torchsnapshot.failures import NotStatefulError

if TYPE_CHECKING:
    _Dict = UserDict[str, Any]
else:
    _Dict = UserDict

__all__ = ["RNGState", "StateDict", "Stateful", "check_app_state"]


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state and takes it back: modules, optimizers, schedulers, `StateDict`."""

    def state_dict(self) -> dict[str, Any]:
        """The state; its tensors may be the live ones."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state that `state_dict` gave."""
        ...


class StateDict(_Dict):
    """A dict that is Stateful: for counters, loose tensors and other values without `state_dict`.

    A restore replaces the values that the snapshot has, and leaves others as they are.
    """

    def state_dict(self) -> dict[str, Any]:
        """The content, which is live."""
        return self.data

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the values that `state_dict` has."""
        self.data.update(state_dict)


def check_app_state(app_state: Any) -> None:
    """Refuse what is no app state.

    Raises:
        NotStatefulError: it is not a mapping of names to Stateful objects.
    """
    if not isinstance(app_state, Mapping):
        raise NotStatefulError(f"an app state maps names to objects, this is a {type(app_state).__name__}")
    for key, value in app_state.items():
        if not isinstance(key, str):
            raise NotStatefulError(f"an app state maps names to objects, one name is {key!r}: use text")
        if not isinstance(value, Stateful):
            raise NotStatefulError(
                f"app_state[{key!r}] is a {type(value).__name__}, which has no state_dict and load_state_dict: "
                f"put it into a StateDict"
            )
