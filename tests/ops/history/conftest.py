"""The server of PostgreSQL that the index is tested with, for the verbs too."""

from tests.index.conftest import server_url

__all__ = ["server_url"]
