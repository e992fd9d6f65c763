"""The SQL index: where every object lies, what refers to what, and the history of commits.

Invariant: everything in here can be derived from the packs and refs of the store; losing it loses
nothing. Knows nothing of files of the store, tensors or plans; only SQL.
"""
