"""From live training state to the tree that a commit is made of; nothing is copied.

    1. `capture_state` walks the state depth first and asks Stateful objects for their state_dict().
    2. Each tensor and array becomes an item with its spec and a source that reads boxes of it later, while the
       commit hashes it.
    3. Tensors that are more than one strided memory become containers of their parts, or items with a placement.

Files:

    capture.py      the walk: `capture_state`
    tensors.py      raw bits of torch tensors and NumPy arrays: which can be read, as sources and targets
    composites.py   sparse and quantized tensors as containers of plain ones, and back
    sharded.py      DTensor and ShardedTensor in global coordinates

Must not know commits, nor how values are encoded. (restore/ fills tensors through the targets of this folder.)
"""
