"""The SQL index: where every object is stored, what refers to what, and the history of commits.

    1. a database is opened, in SQLite or PostgreSQL, and its tables are made or upgraded
    2. packs are added as they come, each with all that it holds, and dropped when they are gone
    3. questions are asked of the rows: functions over a connection, each in a transaction that sees one moment
    4. what garbage collection asks is found from candidates that were noted as packs came and went
    5. an index that was made anew takes the place of another, in one step

    the tables      `schema.py`; `rows.py` (statements as text, which go to the driver, the plain values that go in and
                    come out, and text that a database can hold)
    for people      `views.py` (views of the tables that stay as they are) over `view_sql.py` (their columns, in the
                    words of each database); `query.py` (SQL over them, read-only and within limits)
    the database    `database.py` (opening it, transactions, many rows at once) over `sqlite.py` (and who has a file
                    open) and `postgres.py` (with the roles of a shared one); `db_errors.py` (what they refuse)
    the index       `index.py` (`Index`: transactions, packs, its schema made or upgraded, one in the place of another),
                    `remembered.py` (what packs do not hold: facts by name, refs as last seen, restore plans, rank by
                    rank, and the log of restores)
    nodes           `manifests.py` (what trees, tensor nodes and layouts say becomes rows)
    questions       `contents.py` (packs go in and out, objects and where they are), `history.py` (commits, which of
                    them meet conditions, and all that a plain log asks, without importing SQLAlchemy), `usage.py`
                    (bytes, and who holds what), `integrity.py` (is it as the packs say, how far damage reaches)
    of states       `trees.py` (containers opened by their rows, of one state or many), `entries.py` (the entries of one
                    state), `tree_diff.py` (where two differ, and what commits changed), `finding.py` (what is where)
    garbage         `garbage.py` (what to look at; what is dead, pack by pack; and which of what is absent other
                    repositories keep)

Invariant: everything in here can be derived from the packs and refs of the store; losing it loses nothing but time
(and the few facts of `schema.REMEMBERED`). Must not know: files of the store, tensors, how restores are planned,
which refs there are now.
"""
