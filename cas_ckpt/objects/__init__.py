"""Stored objects, as bytes and as values: ids, canonical encoding, nodes, packs, and the values of a state.

How a state becomes bytes:

1. a state is containers, tensors and values: `state.py`; shapes, dtypes, boxes, grids and placements: `spec.py`
2. a tensor is cut into cells; each cell is a chunk, named by the digests of its leaves: `digest.py`
3. plain values become bytes: `values.py`, `structures.py`
   (registered types, named tuples, dataclasses, and what stands for those that nobody registered)
4. tensors, containers and commits become nodes, named by their bytes: `nodes.py`; who held what becomes a layout:
   `layouts.py`; the one form that each has in msgpack, and the sealed records of config, refs and gc: `digest.py`
5. chunks and nodes become entries of packs: `pack.py` (with what meta packs say besides, to spare readers requests);
   how the bytes of a chunk are compressed there: `codec.py`

`graph.py` has the graph of commits as plain values: ancestors, order, merge bases. `patterns.py` says which keys a
pattern means.

Invariant: ids follow from plain bytes alone; docs/format.md is the contract, golden files in tests/golden hold it.
Must not know: torch, storage, SQL; starts no threads. Looking at a history must not import numpy from here.
"""
