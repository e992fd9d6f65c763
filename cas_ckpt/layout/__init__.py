"""Who holds what, and who does what: pure plans over shapes and ranks.

1. `holdings.py`: which elements each rank holds, from a placement alone, and of each cell and leaf of a tensor (how it
   is cut: objects/spec.py)
2. `save_plan.py`: who hashes and writes which cell of a state that several ranks hold
3. `restore_plan.py`: which rank reads which chunk, and who gets what of it; and that in numbers, rank by
   rank and on the whole
4. `balance.py`: shares work out so that all have about as much to do; both plans use it
5. `target_layout.py`: a mesh of ranks that need not exist, and a rule where each tensor goes
6. `key_map.py`: a tree under other names, its tensors divided, joined, turned and cast: where each element is stored;
   `ready_maps.py`: the rules between the names of Hugging Face, torchtitan and Megatron

Invariant: pure and deterministic, so equal inputs give equal plans on every rank, without talking.
Must not know: torch, chunk ids, packs, storage.
"""
