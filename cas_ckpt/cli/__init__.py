"""The command line: parse, call one verb of the face, print.

    1. `main.py`: the verb is found and its module imported; what it raises becomes a line and an exit code
    2. `command.py`: settings of the run, how a verb is declared, common options and their types
    3. a file of verbs runs: `upkeep.py` (init, status, index, store, fsck), `files.py` (import, export, checkout),
       `log.py`, `show.py` (show, ls, read, stats, du), `history.py` (reflog, lineage, metrics and other questions),
       `diff.py`, `find.py`, `shards.py`, `plan.py`, `sql.py`, `refs.py` (branch, tag, pin, resolve),
       `remotes.py` (clone, push, fetch, pull, watch, remote), `bundle.py`, `retention.py` (forget, policy, gc, repack),
       `cache.py`, `signing.py` (verify, signers)
    4. `output.py`: text, tables and JSON, none of it with control characters; how errors are worded

Invariant: nothing is decided here about repositories; this room alone reads the environment.
"""
