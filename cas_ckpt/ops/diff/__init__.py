"""diff: what one commit has that another has not, or has otherwise.

1. `diff.py`: resolves both revisions, arranges the steps below, and pairs what was moved
2. `walk.py`: the entries that differ, from the index; then values, and the chunks of tensors, from their nodes
3. `elements.py`: if asked, streams the changed chunks of both sides, a cell at a time
4. `numbers.py`: what two stretches of numbers differ by, as sums that can be added up
5. `answer.py`: the answer as plain values

Invariant: work follows what differs; neither commit is loaded whole.
Must not know: torch; how answers are shown (cli/).
"""
