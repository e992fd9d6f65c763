"""Tensors that are in the memory of a GPU: hashed there, so that only chunks that are new come to the host.

    1. A commit asks the sources of such tensors for their hasher (transfer/save.py; `leaf_hasher`).
    2. hasher.py has one for every device, and says whether it is believed: cells.py finds where the cells are in
       memory, kernels are launched on a stream of their own.
    3. kernels.py is BLAKE3 for Triton; it is imported when the first tensor is hashed, and need not be there.
    4. copies.py brings bytes over, on streams of their own, from and to pinned memory; small tensors many at a time.
    5. Before a state is staged for `commit_async`, `leave_out` in background/commits.py leaves out what the last such
       commit has stored.

Tests run the kernels in Triton's interpreter, and everything else with tensors of the CPU that go the same way; what
only a GPU can show is in tests/gpu (docs/performance.md, "GPUs").

Invariant: no id depends on who hashed. Where Triton, a compiler or the device fails, or its digests differ from the
host's, the host hashes, and that is said once. Must not know commits, nor what is stored.
"""
