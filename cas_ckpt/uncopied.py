"""Objects that cannot be copied or pickled: a copy would share files and locks that it does not own.

The half of a copy that fails at a lock is an object like any other, and closes the descriptor numbers that it got:
those of the original, or of whatever file has one of them by then.
"""

from __future__ import annotations

from typing import NoReturn


class Uncopied:
    """Refuses `copy`, `deepcopy` and `pickle`, as those who call them expect it: by TypeError."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} is neither copied nor pickled, for it holds open files and locks: keep it out of "
            "what is (of a module, for example), and open the repository again where it is needed"
        )
