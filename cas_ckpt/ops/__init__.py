"""The verbs: what people do with a repository, a package (or a file) each.

A verb is a function that takes an open repository (`core/handle.py`) and options, and returns a frozen report of
what it did or found. Each method of `Repository`, and each command of the command line, calls one of them.

    commit/       states become nodes and chunks, are written, and a ref is moved to the new commit
    checkout/     a commit's state is read into memory, in whatever layout it is wanted
    refs.py       branches, tags and pins: made, renamed, deleted, brought back; who signed a commit or tag
    history/      questions about commits: log, show, lineage, usage
    diff/         how two commits differ
    sync/         commits travel between repositories: push, fetch, pull, clone
    retention/    which commits keep their data: rules, policies, forgetting
    gc/           data that nothing needs is deleted, packs are rewritten
    fsck/         damage is found and repaired, the index is made anew

Arrows among verbs: diff and retention may use commit, checkout, history, gc and fsck; nothing else.
May not know: torch, the command line, `Repository`, how several ranks are connected.
"""
