"""core: the open repository, below every verb: what is true in the store, and how it is read and moved.

    1. create.py makes a repository, config.py is what it says of itself, settings.py of its surroundings, which hosts
       of those get credentials, and why a push to one failed; handle.py opens it: store, index and refs, kept in
       agreement; host_cache.py keeps what was read of a remote one; shared_index.py says where the index of a team is,
       and which roles it has there
    2. refs.py has the mutable names of commits, with logs; ref_store.py reads, lists and swaps them; protocol.py has
       what collectors and writers tell one another; publish.py moves a ref by that protocol, which is the moment of
       every commit
    3. packs.py brings packs into the index, or all of them anew, and reads nodes by what the index says, each proven by
       its id; tree.py reads the tree of a commit, finds the chunks of its tensors, and asks the index what states hold,
       for verbs that need none of their bytes;
       hints.py writes into meta packs what spares readers of remote ones requests, and reads it; elsewhere.py
       brings from tiers what is lost or damaged here
    4. live.py knows what refs keep, whether all that is kept is stored, and whether tiers have what is about to go
       here; forgotten.py which data nothing keeps any more
    5. signatures.py judges who signed a commit or tag, and which branches take signed commits only
    6. revisions.py reads what people write for a commit, units.py what they write for times, sizes and numbers;
       records.py is what they get back

Invariant: a ref never names a commit of which a byte is not durable; the index is never believed against the store, and
only lists are made of what it alone says.
May not know: the verbs (ops/), torch, the command line.
"""
