"""fsck: find damage, say what it costs and which commits it hits, and repair it from intact copies.

The story of a check (`check.py`; its answer is in `report.py`):
    1. `records.py`: config, gc/state, refs and the other small records
    2. `packs.py`: every pack and every node, and whether the index agrees with them; if that is asked for, every byte
       of the packs, or of some of them; one job of many does this alone, for its share
    3. each damaged place becomes a problem, in `check.py` itself: what is lost, the commits, refs and keys that need
       it, and the command that repairs it

The story of a repair (`repair.py`):
    1. config, gc/state and records, in `repair.py` itself: nothing can be opened without them
    2. `repair_packs.py`: lost objects are brought from other repositories, damaged packs taken out of use,
       after their intact objects were copied into new ones
    3. refs that are damaged or lost are made again, and the index from the packs, in `repair.py` again

Invariant: a check changes nothing but the scrub log and an index that is behind; a repair removes nothing intact.
Both work on a repository that cannot be opened.
May not know: the command line, torch.
"""
