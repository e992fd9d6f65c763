"""Arguments of several methods: patterns of keys, keys to sign with, whom to trust."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from cas_ckpt.signing.keys import SigningKey
    from cas_ckpt.signing.trust import Trust

Keys: TypeAlias = str | Sequence[str] | None
"""Patterns of keys: `*` and `?` inside a component, `**` across; a container stands for all below it."""

Trusted: TypeAlias = "str | PathLike[str] | Sequence[str] | Trust"
"""Whose signatures count: a file of allowed signers or public keys, a public key, several, or a `Trust`."""


def given_trust(given: Trusted | None) -> Trust | None:
    """`given` as a `Trust`; None stays None.

    Raises:
        InvalidInputError: a line that is not understood. StorageError: a file cannot be read.
    """
    if given is None:
        return None
    from cas_ckpt.signing.trust import as_trust

    return as_trust(given)


def given_key(given: Any) -> SigningKey | None:
    """The key that `sign=` gives; None stays None.

    Raises:
        InvalidInputError: not a key, or one that is encrypted. StorageError: its file cannot be read.
    """
    if given is None:
        return None
    from cas_ckpt.signing.keys import signing_key

    return signing_key(given)


def texts(given: str | Sequence[str]) -> tuple[str, ...]:
    """One text or several, as several."""
    return (given,) if isinstance(given, str) else tuple(given)
