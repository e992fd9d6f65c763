"""sync: commits travel between repositories.

    1. remotes.py: other repositories by name, opened; which refs of ours and theirs go together
    2. missing.py: what one side lacks of the other's commits
    3. send.py: copies it, and moves refs at the end
    4. push.py and fetch.py (with pull and clone): who sends to whom, and which refs; rebase.py: commits put on top of
       those of the other side
    5. bundle.py: the same through a file, bundle_file.py
    6. tier.py: pushes in the background; what they have not brought there yet: core/push_failures.py

Invariant: as in send.py: a ref names a commit only where that is whole.
"""
