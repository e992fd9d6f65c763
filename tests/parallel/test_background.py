"""Work in the background: nobody who waits for it waits for ever, whatever it raises."""

from __future__ import annotations

import pytest

from cas_ckpt.parallel.workers import Background


def test_an_error_of_whoever_is_told_of_errors_is_raised_and_ends_nothing() -> None:
    num_tries = 0

    def work() -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 1:
            raise OSError("the work")

    def told(error: Exception) -> None:
        raise ValueError("the log") from error

    background = Background(work, failed=told)
    background.wake()
    with pytest.raises(ValueError, match="the log"):
        assert background.wait(timeout_s=10), "it is waited for in vain"
    background.wake()
    assert background.wait(timeout_s=10)
    assert num_tries == 2
