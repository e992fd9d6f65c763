"""Files: states come in from safetensors files and model folders, and go out as safetensors.

The story of an import (`cas_ckpt/files.py` chooses by what the path is):
    1. `models.py`: the files of a model folder are found and sorted: weights, side files, parts of a training state
    2. `safetensors.py`: the header of each file is read with suspicion
    3. `files.py`: every tensor becomes a source that reads its box of the file when that is hashed
    4. `names.py`: tensors get the names that they have in live objects, without wrappers, with an adapter's name
    5. the tree of these sources is committed like any state (ops/commit)

The story of an export:
    1. `export.py`: the tensors of a commit are named (an adapter's as PEFT does: `names.py`) and put into shards
    2. `safetensors.py`: headers are written as the library writes them
    3. `files.py`: all files appear together, whole, or not at all

Invariant: memory is one buffer per thread, whatever the size of the files; nothing that a file says is believed.
May not know: torch (what torch.save and DCP write is read in training/ and dcp/).
"""
