"""Live training state of torch: captured for a commit, restored in place, made new.

A commit goes

    1. verbs.py: `commit_state` asks for a tree of the state.
    2. capture/: the state becomes containers, values and tensors that are read later; nothing is copied.
    3. ops/commit/ hashes, packs and publishes the tree.

and a checkout goes

    1. verbs.py: `checkout_state` finds the commit, the same on all ranks, and loads its tree.
    2. restore/: the tree is matched with the live state; whatever does not agree is one error, nothing is touched.
    3. ops/checkout/ verifies every byte, then copies it into the tensors.
    4. restore/: plain values are set, each Stateful object is given its state.

Files:

    verbs.py            commit, checkout, load and read of live state: what joins training/ with ops/
    capture/            from live state to a tree
    restore/            from a tree to live state
    background/         commits that go on while training changes the state
    device/             tensors on a GPU, hashed there
    stateful.py         `Stateful`, `StateDict`; modules and optimizers under names that no wrapper changes
    optimizers.py       the state of an optimizer by the names of its parameters
    per_rank.py         `PerRank`, `RNGState`, generators: values that each rank has for itself
    process_group.py    `Peers` over torch.distributed
    connections.py      the connections under it, and who is to blame when they fail
    torch_internals.py  all that is used of torch beside its public interface
    retention_hook.py   `RetentionHook`: housekeeping from within a training loop

Must not know the command line, the class `Repository`, or where bytes are stored.
"""
