"""Whose signatures count: allowed signers are read as OpenSSH reads them; any bytes at all get a verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt.errors import CkptError, InvalidInputError
from cas_ckpt.signing.keys import SigningKey
from cas_ckpt.signing.sshsig import MAGIC, parse_signature, string
from cas_ckpt.signing.trust import Trust, Verdict, as_trust, described, matches_list, parse_signers
from tests.signing.armor import unarmored
from tests.signing.test_keys import KEYS, MESSAGE, private

KEY = SigningKey.from_bytes(private("ed25519"))
PUBLIC: str = KEYS["ed25519"]["public"].strip()
OTHER: str = KEYS["rsa"]["public"].strip()
BLOB = KEY.sign(MESSAGE)
DAY_S = 1_795_392_000.0
"""2026-11-23, 00:00 UTC."""


def verdict(line: str, blob: bytes | None = BLOB, *, time_s: float = DAY_S) -> Verdict:
    return as_trust([line]).verdict(blob, MESSAGE, time_s=time_s).verdict


def test_a_signer_is_known_by_the_key_and_named_by_the_file() -> None:
    found = as_trust(["# ours\n", "", f"ann@lab.org,ann@home {PUBLIC}"]).verdict(BLOB, MESSAGE, time_s=DAY_S)
    assert found.is_good
    assert found.signers == ("ann@lab.org,ann@home",)
    assert (found.key_type, found.fingerprint) == ("ssh-ed25519", KEYS["ed25519"]["fingerprint"])
    assert as_trust(PUBLIC).verdict(BLOB, MESSAGE, time_s=DAY_S).signers == ("ann@lab.org",)
    assert as_trust(KEY.public_line).verdict(BLOB, MESSAGE, time_s=DAY_S).signers == (KEY.fingerprint,)


@pytest.mark.parametrize(("options", "wanted"), [
    ('namespaces="cas_ckpt"', Verdict.GOOD),
    ('namespaces="git,cas_*"', Verdict.GOOD),
    ('namespaces="git"', Verdict.UNTRUSTED),
    ('namespaces="*,!cas_ckpt"', Verdict.UNTRUSTED),
    ('valid-after="20261123Z"', Verdict.GOOD),
    ('valid-after="20261123000001Z"', Verdict.EXPIRED),
    ('valid-before="20261123Z"', Verdict.GOOD),
    ('valid-before="202611222359Z"', Verdict.EXPIRED),
    ('valid-after="20260101",valid-before="20270101"', Verdict.GOOD),
    ('valid-after="20250101",valid-before="20260101",namespaces="cas_ckpt"', Verdict.EXPIRED),
    ("cert-authority", Verdict.UNTRUSTED),
    ('NAMESPACES="cas_ckpt"', Verdict.GOOD),
])  # fmt: skip
def test_options_limit_what_a_key_may_sign_and_when(options: str, wanted: Verdict) -> None:
    assert verdict(f"ann {options} {PUBLIC}") is wanted
    assert verdict(parse_signers([f"ann {options} {PUBLIC}"])[0].line) is wanted  # as the record `signers` keeps it


@pytest.mark.parametrize(
    "name", ["ssh-key-2023-05-01", "#1", "#", "a b", 'q"x', "'", "x\ty", "ann,bob", "valid-after=1"]
)
def test_whatever_a_key_is_called_it_can_be_written_down_and_read_again(name: str) -> None:
    """A key of Oracle's cloud is called ssh-key and the day."""
    (signer,) = as_trust([" ".join([*PUBLIC.split()[:2], name])]).signers
    (again,) = parse_signers([signer.line])
    assert again == replace(signer, principals=name.replace('"', "'").replace("\t", " "))
    assert parse_signers([again.line]) == (again,)
    assert verdict(signer.line) is Verdict.GOOD


def test_of_several_lines_of_one_key_one_that_fits_is_enough() -> None:
    lines = [f'ann valid-before="20200101Z" {PUBLIC}', f'"Ann B" namespaces="git" {PUBLIC}', f"ann@new {PUBLIC}"]
    found = as_trust(lines).verdict(BLOB, MESSAGE, time_s=DAY_S)
    assert (found.verdict, found.signers) == (Verdict.GOOD, ("ann@new",))
    assert as_trust(lines[:2]).verdict(BLOB, MESSAGE, time_s=DAY_S).verdict is Verdict.EXPIRED


@pytest.mark.parametrize("line", [
    "ann", f"ann {PUBLIC[:40]}", f"ann no-touch-required {PUBLIC}", f'ann valid-after="yesterday" {PUBLIC}',
    f'ann valid-after="20261399Z" {PUBLIC}', f"ann valid-after {PUBLIC}", f'ann cert-authority="x" {PUBLIC}',
    f'ann valid-before="20260101Z",valid-after="20270101Z" {PUBLIC}', f'ann namespaces="a",namespaces="b" {PUBLIC}',
    f'"ann {PUBLIC}', f'ann namespaces="a {PUBLIC}', "ann ssh-ed25519 %%%%", f"ann ssh-rsa {PUBLIC.split()[1]}",
    "ann sk-ssh-ed25519@openssh.com AAAAGnNrLXNzaC1lZDI1NTE5QG9wZW5zc2guY29t", f"a\x1b[2J {PUBLIC}",
    f'ann valid-before="99999999999999Z" {PUBLIC}', "ssh-ed25519", 'ann "', "ann ,", f"ann =,= {PUBLIC}",
])  # fmt: skip
def test_a_line_that_is_not_understood_is_an_error_that_names_it(line: str) -> None:
    with pytest.raises(InvalidInputError, match="line 2: "):
        as_trust([f"bob {OTHER}", line])


@pytest.mark.parametrize("given", [5, None, [5], b"ssh-ed25519 AAAA", [], ["# nothing"], object()])
def test_what_says_nobody_to_trust_is_refused(given: Any) -> None:
    with pytest.raises(InvalidInputError):
        as_trust(given)


def test_files_of_trust_and_of_revoked_keys(tmp_path: Path) -> None:
    allowed, revoked, krl = tmp_path / "allowed", tmp_path / "revoked", tmp_path / "krl"
    allowed.write_text(f"ann {PUBLIC}\nrsa {OTHER}\n")
    revoked.write_text(f"# stolen\n{PUBLIC}\n")
    krl.write_bytes(b"SSHKRL\n\0\0\0\0\1")
    found = Trust.load(allowed, revoked=revoked).verdict(BLOB, MESSAGE, time_s=DAY_S)
    assert (found.verdict, found.reason) == (Verdict.REVOKED, "its key is revoked")
    assert as_trust(allowed).verdict(BLOB, MESSAGE, time_s=DAY_S).is_good
    with pytest.raises(InvalidInputError, match="KRL"):
        Trust.load(allowed, revoked=krl)
    with pytest.raises(InvalidInputError, match="wanted a public key"):
        Trust.load(allowed, revoked=allowed)
    allowed.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInputError, match="no file of trusted keys"):
        Trust.load(allowed)


def test_a_signature_for_another_namespace_or_by_another_key_is_told_apart() -> None:
    git = unarmored(KEYS["ed25519"]["signatures"]["git"])
    assert verdict(f"ann {PUBLIC}", git) is Verdict.BAD
    assert verdict(f"ann {PUBLIC}", unarmored(KEYS["ecdsa256"]["signatures"]["cas_ckpt"])) is Verdict.UNTRUSTED
    assert verdict(f"ann {PUBLIC}", None) is Verdict.UNSIGNED
    weak = unarmored(KEYS["rsa1024"]["signatures"]["cas_ckpt"])
    found = as_trust([f"ann {KEYS['rsa1024']['public']}"]).verdict(weak, MESSAGE, time_s=DAY_S)
    assert (found.verdict, "2048" in found.reason) == (Verdict.BAD, True)


def test_two_signatures_a_signature_cut_short_and_other_keys_are_bad_ones() -> None:
    blob = string(string(b"sk-ssh-ed25519@openssh.com") + string(b"x" * 32))
    rest = b"".join(map(string, (b"cas_ckpt", b"", b"sha512", string(b"ssh-ed25519") + string(b"y" * 64))))
    security_key = MAGIC + b"\0\0\0\1" + blob + rest
    swapped = parse_signature(BLOB)
    other = parse_signature(SigningKey.generate().sign(MESSAGE))
    named_as = type(swapped)(other.key, other.key_type, swapped.namespace, "sha512", swapped.algorithm, swapped.value)
    for bad in (BLOB + BLOB, BLOB + b"\0", b"", b"SSHSIG", security_key, named_as.blob, bytes(20_000)):
        assert verdict(f"ann {PUBLIC}", bad) is Verdict.BAD
    for length in range(len(BLOB)):
        assert verdict(f"ann {PUBLIC}", BLOB[:length]) is Verdict.BAD
        described(BLOB[:length])


@pytest.mark.parametrize("name", ["ed25519", "ecdsa256", "rsa"])
@given(data=st.data())
def test_no_other_bytes_than_the_signature_are_a_good_one(name: str, data: st.DataObject) -> None:
    blob = bytearray(unarmored(KEYS[name]["signatures"]["cas_ckpt"]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(blob) - 1))
        blob[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=4))
    changed = bytes(blob)
    found = as_trust([f"ann {KEYS[name]['public']}"]).verdict(changed, MESSAGE, time_s=DAY_S)
    same = changed == unarmored(KEYS[name]["signatures"]["cas_ckpt"])
    assert found.is_good == same or (name == "ecdsa256" and _is_same_number(changed))


def _is_same_number(changed: bytes) -> bool:
    """Numbers of ECDSA may be written with zeros in front; nothing relies on a signature having one form."""
    own = parse_signature(unarmored(KEYS["ecdsa256"]["signatures"]["cas_ckpt"]))
    return parse_signature(changed).key == own.key


@given(st.binary(max_size=300))
def test_any_bytes_at_all_get_a_verdict(blob: bytes) -> None:
    for each in (blob, MAGIC + b"\0\0\0\1" + blob):
        assert verdict(f"ann {PUBLIC}", each) is Verdict.BAD
        described(each)


@given(st.text(max_size=120))
def test_any_text_is_trust_or_an_error_of_ours(text: str) -> None:
    for given_ in ([text], [f"ann {text} {PUBLIC}"], [f"{text} {PUBLIC}"]):
        try:
            as_trust(given_).verdict(BLOB, MESSAGE, time_s=DAY_S)
        except CkptError:
            continue


def test_patterns_of_namespaces_are_those_of_openssh() -> None:
    assert matches_list("cas_ckpt", "x,cas?ckpt")
    assert matches_list("cas_ckpt", "*")
    assert not matches_list("cas_ckpt", "")
    assert not matches_list("cas_ckpt", "cas")
    assert not matches_list("cas_ckpt", "!cas_ckpt")
    assert not matches_list("cas_ckpt", "[c]as_ckpt")
    assert not matches_list("cas_ckpt", "*a" * 100_000)
