"""Storage writers, readers and planners: `dcp.save` commits, `dcp.load` checks out.

A save goes

    1. DCP plans on every rank; the writer looks at the repository and takes its turn.
    2. On every rank the plan and the planner's state become a tree, nested again as it was before DCP flattened it.
    3. All ranks commit their trees together: the commit is published here, or nowhere.
    4. On the coordinator, DCP's results are held against the plan.

A load goes

    1. The reader describes the commit to DCP, by flat names; DCP plans reads.
    2. All ranks read the coordinator's commit; the plan is held against the destinations.
    3. Every byte is verified, then copied into place.

Files:

    writer.py       `CasStorageWriter`
    reader.py       `CasStorageReader`; a commit in the words of DCP: `Metadata` by flat name
    staging.py      copies of states for `dcp.async_save`, each in memory of its own
    tree.py         a rank's part of a save as a tree; `CasSavePlanner`, `CasLoadPlanner`
    names.py        the entries of a commit by DCP's flat names
    optimizers.py   a commit's optimizers, by whatever name a target knows their parameters
    group.py        the ranks that save together, whose turn it is, and which repository
    paths.py        `CheckpointPaths`: folders of a training program stand for tags

Invariant: a save is whole or not there, a load touches nothing before all was verified. Must not know DCP's own files.
"""
