"""sync: commits travel between repositories.

    1. remotes.py: other repositories by name, opened; which refs of ours and theirs go together
    2. missing.py: what one side lacks of the other's commits
    3. send.py: copies it, and moves refs at the end
    4. push.py: to another repository, into a new bundle, and in the background to tiers (what they have not got yet:
       core/settings.py)
    5. fetch.py, with pull and clone: from another repository, or from a bundle
    6. bundle.py: the values of a repository in one file

Invariant: as in send.py: a ref names a commit only where that is whole.
"""
