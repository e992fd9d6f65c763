"""checkout: from a commit's tree into memory; also one region of one tensor, and plans without a restore.

1. the caller (training/, dcp/) loads the tree and names the targets: a `TensorCopy` for each tensor
2. `checkout.py`: the chunks of all of them are found, verified and copied into place, by one process or
   shared by several ranks
3. `checkout.py`: also one region of one tensor as a new array, of which only the leaves that it touches are read
4. `derived.py`: tensors that a key map has made of others (layout/key_map.py) are copied part by part
5. `restores.py`: how a commit would be restored into a layout of ranks, as a report; and the log of restores that were
   made, each beside what was planned for it

Invariant: no target is touched before everything that is wanted was verified.
Must not know: torch, and how targets bring bytes to devices.
"""
