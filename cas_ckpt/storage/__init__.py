"""storage: key -> bytes, on whatever medium.

    store.py          the contract: what every store MUST do and why, the checks of keys and ranges, and the errors
    file.py           a store in a folder: a value is a file; streamed values are written past the page cache
    disk.py           how a file appears whole and durable under its name; turns of writers; open files, the page cache
    memory.py         a store in a dict, for tests, demos and `memory://`
    object_store.py   a store over any object storage: keys under a prefix, conditions by value, listings
    object_parts.py   its reads (ranges in parts, bodies that break off are read on, listings in order of code points),
                      its uploads of parts, lost replies, what dead writers left; threads and memory for parts
    bucket.py         what a vendor of object storage implements for it; and what vendors share: timeouts, a client for
                      each process, bounded answers, errors without secrets
    s3.py             S3 and what speaks its protocol, on boto3
    gcs.py            Google Cloud Storage: objects, parts that are composed
    gcs_requests.py   its credentials, connections, retries and limits, on google-cloud-storage
    stored_zip.py     zips in which nothing is compressed: where their members are
    url.py            from a path or URL to its store; scheme://bucket/prefix?setting=value
    probe.py          what a medium really does: conditional writes, order of listings, a shared page cache

The story of a write: 1. `check_key` refuses what some store could not hold; 2. the bytes go into a temporary, which is
synced; 3. the temporary gets the key's name in one step, under the condition that was asked for; 4. the name is synced.

Invariant: a value is stored whole or not at all, for every reader, whatever dies. May not know: hashes, packs, refs,
tensors, SQL; is called by many threads and starts none, but for the parts of one value (object_parts.py).
"""
