"""The command line: parse, call one verb of the face, print.

    1. `main.py`: the verb is found and its module imported; what it raises becomes a line and an exit code
    2. `command.py`: settings of the run, how a verb is declared, common options and their types
    3. a file of verbs runs, which `SECTIONS` in main.py names: `upkeep.py` (the repository as a whole), `log.py` (log
       and diff), `plan.py`, `show.py` (what commits hold, and files that come in and go out), `history.py` (how they
       came about), `refs.py` (names of commits, who signed them), `remotes.py`, `retention.py`
    4. `output.py`: text, tables and JSON, none of it with control characters; how errors are worded

Invariant: nothing is decided here about repositories; this room alone reads the environment.
"""
