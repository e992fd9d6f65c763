"""The command line: parse, call one verb of the face, print.

    1. `main.py`: the verb is found and its module imported; what it raises becomes a line and an exit code
    2. `command.py`: settings of the run, how a verb is declared, common options and their types
    3. a file of verbs runs: `upkeep.py` (init, status, index, store, cache, fsck),
       `files.py` (import, export, checkout), `log.py`, `diff.py`, `plan.py`,
       `show.py` (what commits hold: show, ls, read, find, shards, stats, du),
       `history.py` (how they came about: reflog, lineage, metrics, sql and others),
       `refs.py` (branch, tag, pin, resolve), `signing.py` (verify, signers),
       `remotes.py` (clone, push, fetch, pull, watch, remote, bundle),
       `retention.py` (forget, policy, gc, repack)
    4. `output.py`: text, tables and JSON, none of it with control characters; how errors are worded

Invariant: nothing is decided here about repositories; this room alone reads the environment.
"""
