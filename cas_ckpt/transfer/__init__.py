"""transfer: bytes between memory, packs and ranks, by the threads of parallel/.

Saving:
    1. save.py hashes every cell, asks what is stored, and hands on what is new; what can be hashed where it is (on a
       GPU) it names before. It says, too, with how many threads and packs; hashing.py has the checksums that
       compare memory at its own speed
    2. pack_writer.py lends packs to threads that write chunks; each is durable before it is named

Restoring:
    3. chunk_reader.py verifies chunks, whole or by leaves, and brings them to all targets that want them; fetch.py does
       that for a list of chunks: first every byte is verified, then every byte is copied into place; or both chunk by
       chunk, in one pass. Over a network sources.py joins what is near into spans, arrivals.py reads them; sources.py
       keeps what was read and verified until it is copied; arrivals.py reads too, past the page cache, what a local
       disk has and memory has not
    4. scatter.py does it over several ranks, each chunk read by one of them, in rounds of bounded size
    5. scan.py reads packs from front to end, for fsck

Between stores: copying.py copies extents as they are stored, verified, into new packs of another store.
staging.py has the memory that a state is copied into for a commit in the background, and copies it.

Invariant: nothing is written or restored that was not hashed as it was read. May not know: the index, refs, torch, what
keys mean.
"""
