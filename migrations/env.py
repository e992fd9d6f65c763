"""Runs the migrations of the index on the connection that cas_ckpt.index.index hands over.

The caller owns the transaction and the lock; nothing is opened or committed here. For a shell
(`alembic -c ... upgrade`) there is no configuration file on purpose: use `cas-ckpt index rebuild`.
"""

from __future__ import annotations

from alembic import context

from cas_ckpt.index.schema import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA, transactional_ddl=True)
context.run_migrations()
