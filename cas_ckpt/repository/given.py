"""Arguments of several methods: patterns of keys, keys to sign with, whom to trust."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from types import EllipsisType

    import numpy as np

    from cas_ckpt.objects.codec import EncodingPolicy
    from cas_ckpt.signing import Trust

Encoding: TypeAlias = "EncodingPolicy"
"""How new chunks are stored."""

ExportFormat: TypeAlias = Literal["safetensors", "torch", "dcp"]
"""What an export writes."""

UsageBy: TypeAlias = Literal["commit", "branch", "tensor", "dtype"]
"""What a row of `du` is of."""

Repair: TypeAlias = Literal["config", "state", "records", "packs", "chunks", "refs", "index"]
"""A kind of repair."""


class TorchDtype(Protocol):
    """A `torch.dtype`."""

    @property
    def is_floating_point(self) -> bool:
        """As torch has it."""
        ...


class TorchDevice(Protocol):
    """A `torch.device`."""

    @property
    def type(self) -> str:
        """As torch has it."""
        ...


class ProcessGroup(Protocol):
    """A `torch.distributed.ProcessGroup`."""

    def rank(self) -> int:
        """As torch has it."""
        ...

    def size(self) -> int:
        """As torch has it."""
        ...


Device: TypeAlias = str | int | TorchDevice
"""Where tensors go, e.g. "cuda"."""

DtypePattern: TypeAlias = "str | TorchDtype | np.dtype[Any] | type[np.generic]"
"""A dtype, or text: its name ("bfloat16", "bf16") or a pattern of names ("float8_*")."""

ShapePattern: TypeAlias = "str | Sequence[int | None | EllipsisType]"
"""Sizes; None stands for any size, ... for any number of dimensions."""

Keys: TypeAlias = str | Sequence[str] | None
"""Patterns of keys: `*` and `?` inside a component, `**` across; a container stands for all below it."""

Trusted: TypeAlias = "str | PathLike[str] | Sequence[str] | Trust"
"""Whose signatures count: a file of allowed signers or public keys, a public key, several, or a `Trust`."""

KeyFile: TypeAlias = str | PathLike[str] | None
"""The file of a key that signs: private, or public where an ssh-agent holds the private one."""


def given_trust(given: Trusted | None) -> Trust | None:
    """`given` as a `Trust`; None stays None.

    Raises:
        InvalidInputError: a line that is not understood. StorageError: a file cannot be read.
    """
    if given is None:
        return None
    from cas_ckpt.signing import as_trust

    return as_trust(given)


def given_key(given: KeyFile) -> str | None:
    """The absolute path of the key that `sign=` gives; None stays None.

    Raises:
        InvalidInputError: no path. StorageError: its file cannot be read.
    """
    if given is None:
        return None
    from cas_ckpt.signing import key_path

    return key_path(given)


def texts(given: str | Sequence[str]) -> tuple[str, ...]:
    """One text or several, as several."""
    return (given,) if isinstance(given, str) else tuple(given)
