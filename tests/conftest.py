"""How the tests run: the same examples every time, unless a search is asked for.

`pytest --hypothesis-profile=search` looks for new counterexamples.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("ci", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile(
    "search", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("ci")
