"""A commit that is made by a worker process, so that the interpreter of this one is free.

    1. worker.py: `CommitWorker` starts the process (parallel/child_process.py), lends it the memory that the state was
       staged in, and sends the tree and the request
    2. child.py, in that process: opens the repository, reads the lent memory, and makes the commit as ever. What only
       the trainer's process has is asked for: memory that is not staged, the other ranks
    3. packing.py: what goes there: the tree, its tensors in lent memory or asked for, the request
    4. worker.py again: the commit that was made moves `head`; of a child that died, whether it had made the commit
       is found out before anybody is told

Invariant: the commit is that which `commit_live` would have made here. The child has no torch, no device,
and no socket of this process; it ends with this process.
"""
