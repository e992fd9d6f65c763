"""Commits that go on in the background, while training changes the state.

    1. commits.py: a call of `commit_async` captures the state, stages it, and submits a commit of what is staged;
       `BackgroundCommits` is what one open repository has of this
    2. staged.py: `Snapshot`, the captured tree with sources that are staged; memory from transfer/staging.py
    3. pending.py: `PendingCommit`, which the caller gets, and the queue: one thread a repository makes the commits, in
       the order of the calls; the interpreter's end waits

With `snapshot="lazy"` a thread goes on staging after the call, and every step of an optimizer waits for it; changes.py
finds what of a state only optimizers change, and changes that no hook sees.

Where more ways plug in:

- **When the state is copied** (`snapshot=`): `BackgroundCommits._stage`. It must end with `job.may_begin` set and,
  before the state may change, with `snapshot.settled`; `Snapshot.stage_all` and `stage_from_back` copy. A stager that
  goes on after the call copies from the same `Snapshot.tensors`, reports a change that it finds by
  `Snapshot.abort(error)`, and is waited for by `Snapshot.wait_settled`. Until a tensor is staged its `live` source says
  where it is. Whatever breaks a snapshot is raised by `read` or by `saved`, at the latest before anything is published.
- **Where the commit is made** (`worker=`): `BackgroundCommits.make`, in the thread of the queue or by a process
  (ops/commit/worker.py), gets the staged tree and the settled request (plain values only). Memory that another process
  is to map comes from `StagingPool(shared=True)`; `StagedTensor.boxes` and `.places` say which bytes of which arena a
  tensor is, and `Snapshot.arenas` has the files. What is not staged (`live`) can only be read in this process.
- **How memory is made and copied**: transfer/staging.py (`prepare=`, `dismiss=`, `copy_into`).

- **What is not copied**: `StagedTensor.leave_out`, before anything is staged; `leave_out` in commits.py does that
  for tensors on a GPU, whose digests it has.

Invariant: a commit is the state at the moment of the call, or fails; a failure reaches somebody. Must not know the
command line or the class `Repository`.
"""
