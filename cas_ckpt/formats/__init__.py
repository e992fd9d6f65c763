"""formats: import and export of files of any kind.

`verbs.py` chooses by what the path is. An import makes a tree whose sources read their part of a file when that is
hashed; the tree is committed like any state (ops/commit). An export names and orders the tensors of a commit, and
lets all files appear together, whole, or not at all.

    safetensors.py        headers, read with suspicion and written as the library does; shards
    models.py             model folders; names in live objects, wrappers, adapters of PEFT
    folders.py            files of an import and an export, whatever their format
    torch_file.py         files of torch.save
    trainer_folders.py    checkpoints of Trainer and of Accelerate, written back
    pickles.py            pickles of strangers, read without running anything
    dcp_import.py, dcp_export.py, dcp_metadata.py   folders of torch.distributed.checkpoint's own files
    torchsnapshot_import.py, torchsnapshot_metadata.py   folders of torchsnapshot

Invariant: no code in a file is run, nothing that a file says is believed, and memory is a buffer for each thread,
whatever the size of the files. Must not know the command line or the class `Repository`.
"""
