"""How far searches go: a small part in each run, all of it in `make search` (`--hypothesis-profile=full`).

The full numbers are for who changes what they search, and for the night: .ci/run with FULL_SEARCH=1.
"""

from __future__ import annotations

from hypothesis import settings


def tries(small: int, full: int, search: int | None = None) -> int:
    """How often a search tries: `search` where new counterexamples are looked for (default: `full`)."""
    profile = settings.get_current_profile_name()
    if profile == "search":
        return full if search is None else search
    return full if profile == "full" else small
