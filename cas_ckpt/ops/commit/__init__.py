"""commit: a training state becomes a commit on a branch, made by one process or by several ranks together.

    1. commit.py is the frame, the same for one process and for many ranks. It checks the request and, on rank 0,
       settles where the commit goes and what it names (request.py; of that, what users choose: options.py)
    2. one process saves what it has: the state is drafted, every cell is hashed, and what is new is streamed into data
       packs (save.py)
    3. several ranks save what they have together (ranks.py): they agree on one state (agree.py) that is merged from
       what each of them describes (merge_states.py), compare replicas, and save whole cells and those
       that straddle ranks (straddling_cells.py)
    4. what was declared frozen is compared with what was committed before in place of being hashed (frozen.py)
    5. another process can do all of this for one that trains (worker.py), by what is in worker_process.py
    6. rank 0 publishes: nodes and commit in a meta pack, then the swap of the ref (core/publish.py), then the index;
       and tells the other ranks what came of it (agree.py)

Invariant: before the swap of the ref nothing of a commit is visible, after it everything is there and durable.
May not know: torch, files, how ranks are reached; states come as containers, tensors and values (objects/state.py).
"""
