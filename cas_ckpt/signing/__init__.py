"""Signatures as git makes them with SSH keys: bytes in, a signature or a verdict out.

    1. `sshsig.py`   the bytes of a signature (SSHSIG of OpenSSH), and of public keys
    2. `keys.py`     private keys that sign, public keys that verify; this file alone imports cryptography
    3. `trust.py`    whose keys count: allowed_signers files and lines, times of validity, revoked keys; the verdict

Invariant: a verdict is an answer, never an exception, whatever bytes it is asked about; a private key is in no repr,
log or error. Knows nothing of commits, tags and stores.
"""
