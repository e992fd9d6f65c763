"""Questions about history: what was committed, what it holds, where it came from, and what it costs.

    1. a question begins at revisions or at all refs, which the store knows
    2. the history behind them comes from the index, brought up to date where it lacks a commit
    3. answers are plain values (`CommitInfo` and its kind, core/records.py); forgotten commits are marked or left out

`log.py` is the log, its filters by key and its rankings by metric, and one commit alone; `quick_log.py` a plain log
without what takes long to import, for the command line; `find.py` the entries of a commit, of all of history, and the
commits that hold them; `shards.py` which ranks held which region of entries; `lineage.py` what a state was made from,
where histories meet, and which commits hold or share content; `usage.py` bytes by commit, branch, tensor and dtype, the
state of the repository, and what a month of a run costs in a bucket; `sql.py` SQL that people write, over the views of
the index.

Must not know: tensors as torch has them. Nothing is written but the index, brought up to date.
"""
