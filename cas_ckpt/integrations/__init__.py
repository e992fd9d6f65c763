"""Where trainers meet a repository: a module a framework, imported by those who use it and by nobody else.

    hf.py            `CasCallback` for transformers.Trainer and what is built on it (TRL, PEFT); `CasTrainerMixin`
    hf_files.py      commits of the callback in Trainer's own files; `write_checkpoint`
    accelerate.py    `state`, what a loop of one's own commits; `commit_saves` for save_state and load_state
    data.py          `ElasticLoader`, batches that any number of data parallel ranks go on with
    lightning.py     `CasModelCheckpoint`, a callback of Lightning's Trainer
    lightning_io.py  `CasCheckpointIO`, where Trainer and Fabric save
    lightning_files.py    the files at Lightning's paths, which name commits
    lightning_shards.py    `CasShards`, for strategies of Lightning that write shards
    torchtitan.py    `CasCheckpointManager`, in place of torchtitan's own
    megatron.py      `CasStrategy` for dist_checkpointing of megatron-core, whose folders name commits
    torchft.py       `CasTransport`: replicas heal from commits
    torch_checkpointing.py    `CasCheckpointManager`, in place of a CheckpointManager of torch_checkpointing
    ray.py           `CasCheckpoints`, what a loop under ray.train saves and resumes by
    ranks.py         what ranks tell one another beside a commit
    saves.py         `Saves`, what becomes of saves that fail
    rotation.py      what adapters that keep the youngest commits forget

1. An adapter uses public hooks and names of its framework, nothing else of it.
2. It hands live objects to `commit` and `checkout`: nothing is pickled, tensors are restored in place.
3. Commits and checkouts are collective: the hooks that call them run on all ranks. Where a framework gathers a state
   and saves it on rank 0 alone, as Lightning does, rank 0 opens the repository for itself.
4. A save that fails is an error in the log `cas_ckpt` and training goes on, unless `on_save_error="raise"`; the commit
   before it stays.

Importing this package imports no framework.
"""
