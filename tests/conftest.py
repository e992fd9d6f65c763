"""How the tests run: the same examples every time, unless a search is asked for; and what many of them begin with.

`pytest --hypothesis-profile=search` looks for new counterexamples.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle

settings.register_profile("ci", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile(
    "search", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("ci")


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[RepositoryHandle]:
    """An empty repository in `tmp_path / "repo"`."""
    made = init_repository(tmp_path / "repo")
    yield made
    made.close()
