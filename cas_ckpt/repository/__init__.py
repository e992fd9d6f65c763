"""repository: the one class that people use, every method one verb.

    1. repository.py: `Repository`; training state goes in and comes out, and files of it
    2. opened.py: how it is made, opened and closed, and the ranks that it works together with; no verbs
    3. commits.py: what commits hold, their history, and plans of restores
    4. names.py: branches, tags, pins, signatures; other repositories, and what travels to and from them
    5. upkeep.py: sizes, retention, collection, checking and repair

Invariant: nothing is decided here; a method hands its arguments to a function of ops/ (what needs no torch) or
training/ (what does), which it imports when it is called, so that reading the log costs neither torch nor numpy.
torch is looked at only by a process that has it imported already.
"""

from __future__ import annotations

from cas_ckpt.repository.repository import Repository

__all__ = ["Repository"]
