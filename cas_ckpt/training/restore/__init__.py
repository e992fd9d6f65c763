"""From the tree of a commit to live training state, in place or new.

    1. `plan_restore` goes through the live state and the tree side by side.
    2. What fits becomes a copy, what does not becomes a fault; a draft collects both and raises once.
    3. The caller verifies and copies all bytes.
    4. The plan's `finish` sets plain values and gives each Stateful object its state.

`materialize` does the same without a live state: it allocates memory, has it filled, and puts the objects together.

Files:

    restore.py       `plan_restore`: the walk, its two rules, and Stateful objects
    draft.py         `RestoreDraft`: tensors and arrays matched one by one; copies, loads, mismatches; which targets
                     overlap in memory, or may not be written
    optimizers.py    which stored state belongs to which parameter of a live optimizer
    materialize.py   new objects for stored ones

Invariant: nothing is touched before everything agrees. Must not know where bytes are stored.
"""
