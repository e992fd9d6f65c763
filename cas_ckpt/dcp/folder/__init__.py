"""Folders of torch.distributed.checkpoint's own files: imported as commits, exported from commits.

    1. Import: `.metadata` is read as data and checked; objects are loaded, tensors are left where they are and read
       box by box while the commit hashes them.
    2. Export: the tree is flattened by torch's own rule and written chunk by chunk, `.metadata` last.

Files:

    metadata.py     what `.metadata` says is where, checked; knows no torch
    importing.py    `folder_tree`: the state that a folder holds
    export.py       `export_dcp`: a commit as DCP would have written it

Invariant: no code in a folder is run, and memory does not grow with tensors. Of dcp/storage/ it
knows dcp/storage/names.py, nothing else.
"""
