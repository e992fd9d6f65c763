"""Retention: which commits keep their data, by rules or one by one.

    1. a policy is written down in words of people: `keep_daily=7`, for all branches or for some
    2. the refs and the history behind them are put before the rules, which say of each commit whether it stays, and why
    3. what nothing keeps is recorded as forgotten; its data goes at the next garbage collection, its record stays

`policy.py` is the rules as people write them, the record of the repository that carries them, and what they decide,
pure; `forget.py` asks it about a repository, and tiers whether they still have what is about to be given up here
(core/live.py), and writes the records of forgotten commits; it also answers what would be freed if commits were
forgotten, or a ref were deleted.

Nothing is deleted here.
"""
