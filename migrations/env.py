"""Runs the migrations of the index on the connection that cas_ckpt.index.index hands over.

The caller owns the transaction and the lock; nothing is opened or committed here. Tables change below views only
while there are none: the caller makes them afterwards. For a shell
(`alembic -c ... upgrade`) there is no configuration file on purpose: use `cas-ckpt index rebuild`.
"""

from __future__ import annotations

from alembic import context

from cas_ckpt.index.schema import METADATA
from cas_ckpt.index.views import drop_views

connection = context.config.attributes["connection"]
drop_views(connection)
context.configure(connection=connection, target_metadata=METADATA, transactional_ddl=True)
context.run_migrations()
