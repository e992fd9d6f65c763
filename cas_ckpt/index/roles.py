"""Roles of PostgreSQL for a shared index: what each may do, as SQL that makes them.

    reader       reads tables and views: log, ls, diff, checkout, sql
    writer       and adds rows: commit, branch, tag; removes only what it replaces
    maintainer   owns the schema: makes and upgrades the tables, drops rows of packs: gc, repack, rebuild, fsck's log

Invariant: only the schema of one repository is named. Knows nothing of connections: people run it.
"""

from __future__ import annotations

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.index.postgres import quoted, schema_of
from cas_ckpt.index.schema import (
    FORGOTTEN,
    GC_CANDIDATES,
    HEADS,
    LOCATIONS,
    META,
    METADATA,
    OBJECTS,
    PENDING,
    PLAN_RANKS,
    PLAN_SHAPES,
    PLANS,
    REF_MOVES,
    REF_RECORDS,
    REFS,
    RESTORES,
    SCRUBS,
)

_OF_MAINTAINERS = (GC_CANDIDATES, SCRUBS)
_UPDATED = (META, REFS, HEADS, REF_RECORDS, OBJECTS)
_DELETED = (LOCATIONS, PLANS, PLAN_RANKS, PLAN_SHAPES, RESTORES, PENDING, REF_MOVES, FORGOTTEN)
"""Tables that a writer changes rows of, and removes rows from: places that are not known, old plans and restores, and
what was last read of refs and forgotten commits."""

_MOST_NAME_BYTES = 63

_TEMPLATE = """\
-- Roles for the index of the repository {store_id}. Run it as a superuser, in the database of the index, once the
-- maintainer has made the index, and again after an upgrade of cas_ckpt or a rebuild of a damaged index: running it
-- again does no harm. Then give them to people: GRANT {reader} TO ann; and a password: ALTER ROLE ann LOGIN.
BEGIN;
{roles}
CREATE SCHEMA IF NOT EXISTS {schema};
ALTER SCHEMA {schema} OWNER TO {maintainer};
DO $do$ DECLARE one record; BEGIN
    FOR one IN SELECT c.oid::regclass AS name, c.relkind FROM pg_class c
               WHERE c.relnamespace = {schema_text}::regnamespace AND c.relkind IN ('r', 'v') LOOP
        EXECUTE format('ALTER %s %s OWNER TO {maintainer_in_text}',
                       CASE one.relkind WHEN 'v' THEN 'VIEW' ELSE 'TABLE' END, one.name);
    END LOOP;
    EXECUTE format('GRANT CONNECT, TEMPORARY ON DATABASE %I TO {all_in_text}', current_database());
END $do$;
REVOKE ALL ON SCHEMA {schema} FROM PUBLIC, {writer}, {reader};
REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM PUBLIC, {writer}, {reader};
GRANT USAGE ON SCHEMA {schema} TO {writer}, {reader};
GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {writer}, {reader};
ALTER DEFAULT PRIVILEGES FOR ROLE {maintainer} IN SCHEMA {schema} GRANT SELECT ON TABLES TO {writer}, {reader};
DO $do$ BEGIN
    IF to_regclass({packs_text}) IS NOT NULL THEN
        GRANT INSERT ON {inserted} TO {writer};
        GRANT UPDATE ON {updated} TO {writer};
        GRANT DELETE ON {deleted} TO {writer};
    ELSE
        RAISE NOTICE 'there is no index yet: let the maintainer open the repository, then run this again';
    END IF;
END $do$;
COMMIT;
"""

_ROLE = "DO $do$ BEGIN CREATE ROLE {} NOLOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $do$;"


def roles_sql(store_id: str, *, maintainer: str, writer: str, reader: str) -> str:
    """The SQL that makes the three roles, gives them the index of the repository `store_id`, and what each may do.

    Raises:
        InvalidInputError: no role can be called so, or two are called alike.
    """
    names = (maintainer, writer, reader)
    for name in names:
        if not name or len(name.encode()) > _MOST_NAME_BYTES or not name.isprintable() or "$do$" in name:
            raise InvalidInputError(f"{name!r:.80} cannot be the name of a role: 1 to {_MOST_NAME_BYTES} bytes of text")
    if len(set(names)) < len(names):
        raise InvalidInputError("roles are called alike: give the maintainer, the writer and the reader a name each")
    schema = quoted(schema_of(store_id))
    inserted = [table for table in METADATA.sorted_tables if table not in _OF_MAINTAINERS]

    def tables(some: list[str]) -> str:
        return ", ".join(f"{schema}.{name}" for name in some)

    return _TEMPLATE.format(
        store_id=store_id,
        roles="\n".join(_ROLE.format(quoted(name)) for name in names),
        schema=schema,
        schema_text=_text(schema),
        packs_text=_text(f"{schema}.t_packs"),
        maintainer=quoted(maintainer),
        maintainer_in_text=_in_format(quoted(maintainer)),
        writer=quoted(writer),
        reader=quoted(reader),
        all_in_text=_in_format(", ".join(map(quoted, names))),
        inserted=tables(sorted(table.name for table in inserted)),
        updated=tables(sorted(table.name for table in _UPDATED)),
        deleted=tables(sorted(table.name for table in _DELETED)),
    )


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _in_format(value: str) -> str:
    """`value` inside of a text that is a format."""
    return value.replace("%", "%%").replace("'", "''")
