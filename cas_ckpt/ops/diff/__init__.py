"""diff: what one commit has that another has not, or has otherwise.

1. `diff.py`: resolves both revisions, arranges the steps below, and pairs what was moved
2. `walk.py`: the answer as plain values; the entries that differ, from the index; then values, and
   the chunks of tensors, from their nodes
3. `numbers.py`: if asked, streams the changed chunks of both sides, a cell at a time, and adds up what differs

Invariant: work follows what differs; neither commit is loaded whole.
Must not know: torch; how answers are shown (cli/).
"""
