"""Garbage collection: packs are deleted of which nothing is needed any more, beside any number of writers and readers.

    1. find what lives (core/live.py) and, in the index, what is dead (index/garbage.py)
    2. choose packs: dead ones, and sparse and small ones, whose needed part is copied into new packs first
    3. condemn them in gc/state, fence every ref, rescue what the fenced heads need, delete the rest

`gc.py` is the protocol, step by step (docs/gc.md has its proof), and the copies; `plan.py` the options, which packs to
take, and the report.

Must not know: why commits are forgotten (ops/retention), or how the command line shows a report.
"""
