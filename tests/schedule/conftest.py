"""The server of PostgreSQL that the index is tested with, for schedules too."""

from tests.index.conftest import server_url

__all__ = ["server_url"]
