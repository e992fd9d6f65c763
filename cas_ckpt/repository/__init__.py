"""repository: the one class that people use, every method one verb.

    1. repository.py: `Repository`, how it is made, opened and closed; its verbs come from the files below
    2. states.py: training state goes in and comes out, and files of it
    3. contents.py: what commits hold; history.py: how they follow one another; names.py: branches, tags and pins
    4. remotes.py: other repositories; signatures.py: who signed what
    5. plans.py: restores into other ranks; usage.py: bytes and costs; upkeep.py: collection, checking and repair
    6. opened.py: what all of these work on; ranks.py: the processes that work together; given.py: what several verbs
       are given

Invariant: nothing is decided here; a method hands its arguments to a function of ops/ (what needs no torch) or
training/ (what does), which it imports when it is called, so that reading the log costs neither torch nor numpy.
torch is looked at only by a process that has it imported already.
"""

from __future__ import annotations

from cas_ckpt.repository.repository import Repository

__all__ = ["Repository"]
