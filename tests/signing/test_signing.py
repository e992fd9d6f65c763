"""ssh-keygen signs and verifies for cas_ckpt: with files, agents and encrypted keys; any bytes at all get a verdict."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt.errors import CkptError, InvalidInputError, StorageError
from cas_ckpt.signing import Trust, Verdict, armored, as_trust, described, key_path, parse_signers, sign
from tests.signing.keys import KEYS, MESSAGE, blob_of, key_file, public_line

USABLE = ["ed25519", "ecdsa256", "ecdsa384", "ecdsa521", "rsa"]
PUBLIC, BLOB = public_line(), blob_of("ed25519")
DAY_S = 1_795_392_000.0
"""2026-11-23, 00:00 UTC."""


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of allowed_signers are local ones where no Z is behind them."""
    monkeypatch.setenv("TZ", "UTC")


def verdict(line: str, blob: bytes | None = BLOB, *, message: bytes = MESSAGE, time_s: float = DAY_S) -> Verdict:
    return as_trust([line]).verdict(blob, message, time_s=time_s).verdict


# --- signing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", USABLE)
def test_a_signature_of_before_is_verified_and_so_is_one_made_now(name: str) -> None:
    line = f"ann@lab.org {public_line(name)}"
    assert armored(blob_of(name)) == KEYS[name]["signatures"]["cas_ckpt"]
    for blob in (blob_of(name), sign(str(key_file(name)), MESSAGE)):
        found = as_trust([line]).verdict(blob, MESSAGE, time_s=DAY_S)
        assert (found.verdict, found.signers, found.reason) == (Verdict.GOOD, ("ann@lab.org",), "")
        assert (found.key_type, found.fingerprint) == (public_line(name).split()[0], KEYS[name]["fingerprint"])
        assert verdict(line, blob, message=MESSAGE + b"!") is Verdict.BAD


def test_an_encrypted_key_signs_by_what_asks_for_its_passphrase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = tmp_path / "ask"
    ask.write_text('#!/bin/sh\necho "$PASSPHRASE_OF_A_TEST"\n')
    ask.chmod(0o700)
    monkeypatch.setenv("SSH_ASKPASS", str(ask))
    monkeypatch.setenv("SSH_ASKPASS_REQUIRE", "force")
    monkeypatch.setenv("PASSPHRASE_OF_A_TEST", "correct horse")
    assert (
        verdict(f"ann {public_line('ed25519_encrypted')}", sign(str(key_file("ed25519_encrypted")), MESSAGE)) == "good"
    )
    monkeypatch.setenv("PASSPHRASE_OF_A_TEST", "wrong")
    with pytest.raises(InvalidInputError, match="does not sign: .*incorrect passphrase.*ssh-add"):
        sign(str(key_file("ed25519_encrypted")), MESSAGE)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An ssh-agent that holds the key of RSA."""
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
    process = subprocess.Popen(["ssh-agent", "-D", "-a", tmp_path / "agent"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()  # it listens now
        subprocess.run(["ssh-add", "-q", "-"], input=KEYS["rsa"]["private"].encode(), check=True)
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.mark.usefixtures("agent")
def test_a_key_that_an_agent_holds_signs_by_its_public_key(tmp_path: Path) -> None:
    public = tmp_path / "id.pub"
    public.write_text(KEYS["rsa"]["public"])
    assert verdict(f"ann {public_line('rsa')}", sign(str(public), MESSAGE)) is Verdict.GOOD
    public.write_text(KEYS["ed25519"]["public"])  # of which it knows nothing
    with pytest.raises(InvalidInputError, match="does not sign"):
        sign(str(public), MESSAGE)


def test_a_key_that_does_not_sign_is_an_error_that_says_why(tmp_path: Path) -> None:
    path = tmp_path / "id"
    path.touch(mode=0o600)
    for content in ("", "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n", KEYS["ed25519"]["private"][:200]):
        path.write_text(content)
        with pytest.raises(InvalidInputError, match=f"the key '{path}' does not sign: ") as refused:
            sign(str(path), MESSAGE)
        assert not content or content.splitlines()[1] not in str(refused.value)
    path.write_text(KEYS["ed25519"]["private"])
    path.chmod(0o644)
    with pytest.raises(InvalidInputError, match="too open"):
        sign(str(path), MESSAGE)


@pytest.mark.parametrize("wrong", [5, b"key", None, object()])
def test_what_is_no_path_of_a_key_is_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="give the path"):
        key_path(wrong)
    with pytest.raises(StorageError, match="No such file"):
        key_path(tmp_path / "other")
    with pytest.raises(StorageError, match="directory"):
        key_path(tmp_path)


def test_without_ssh_keygen_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(key_file())
    monkeypatch.setenv("PATH", "/nowhere")
    for work in (lambda: sign(path, MESSAGE), lambda: verdict(f"ann {PUBLIC}")):
        with pytest.raises(InvalidInputError, match="install openssh-client"):
            work()
    assert verdict(f"ann {PUBLIC}", None) is Verdict.UNSIGNED
    assert described(BLOB).fingerprint == KEYS["ed25519"]["fingerprint"]


def test_of_several_lines_of_one_key_one_that_fits_is_enough() -> None:
    lines = [f'ann valid-before="20200101" {PUBLIC}', f'"Ann B" namespaces="git" {PUBLIC}', f"ann@new {PUBLIC}"]
    found = as_trust(lines).verdict(BLOB, MESSAGE, time_s=DAY_S)
    assert (found.verdict, found.signers) == (Verdict.GOOD, ("ann@new",))
    for some in (lines[:2], lines[1::-1]):
        assert as_trust(some).verdict(BLOB, MESSAGE, time_s=DAY_S).verdict is Verdict.EXPIRED
    found = as_trust(lines[1:]).verdict(BLOB, MESSAGE, time_s=DAY_S)
    assert (found.verdict, found.signers) == (Verdict.GOOD, ("ann@new",))


@pytest.mark.parametrize("line", [f"ann\udcff {PUBLIC}", f"{PUBLIC} \ud800", "# \udfff"])
def test_a_line_that_is_no_text_is_refused_before_it_is_asked_of(line: str) -> None:
    with pytest.raises(InvalidInputError, match="line 1: wanted"):
        as_trust([line])


# --- whom to trust ----------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "wanted"), [
    ('namespaces="git,cas_*"', Verdict.GOOD),
    ('namespaces="git"', Verdict.UNTRUSTED),
    ('valid-after="20261123"', Verdict.GOOD),
    ('valid-after="20261123000001"', Verdict.EXPIRED),
    ('valid-before="20261123"', Verdict.GOOD),
    ('valid-before="202611222359"', Verdict.EXPIRED),
    ("cert-authority", Verdict.UNTRUSTED),
    ('valid-after="yesterday"', Verdict.UNTRUSTED),
    ("whatever", Verdict.UNTRUSTED),
])  # fmt: skip
def test_options_limit_what_a_key_may_sign_and_when(options: str, wanted: Verdict) -> None:
    assert verdict(f"ann {options} {PUBLIC}") is wanted


def test_a_public_key_alone_is_trusted_under_the_name_in_its_comment(tmp_path: Path) -> None:
    path = tmp_path / "id.pub"
    path.write_text(f"# mine\n\n{KEYS['ed25519']['public']}")
    for given_ in (KEYS["ed25519"]["public"], path, str(path), {KEYS["ed25519"]["public"]}):
        assert as_trust(given_).signers == (f"ann@lab.org {PUBLIC}",)
    for name in ("ssh-key-2023-05-01", "#1", "a b", 'q"x', "'", "x\ty", "a,!b", "*", ""):
        (line,) = as_trust(f"{PUBLIC} {name}").signers
        assert line == f"{KEYS['ed25519']['fingerprint']} {PUBLIC}"
        assert verdict(line) is Verdict.GOOD


def test_of_several_lines_of_one_key_one_that_is_valid_is_enough() -> None:
    lines = [f'ann valid-before="20200101" {PUBLIC}', f"# comment\n{PUBLIC}", f"bob,ann@new {PUBLIC}"]
    with pytest.raises(InvalidInputError, match="line 2"):
        as_trust(lines)
    found = as_trust([lines[0], lines[2]]).verdict(BLOB, MESSAGE, time_s=DAY_S)
    assert (found.verdict, found.signers) == (Verdict.GOOD, ("bob", "ann@new"))
    assert as_trust(lines[:1]).verdict(BLOB, MESSAGE, time_s=DAY_S).verdict is Verdict.EXPIRED


@pytest.mark.parametrize("line", ["ann", "ann ssh-ed25519 %%%%", "ssh-ed25519", f"ann {PUBLIC}\0", "nobody AAAA"])
def test_a_line_without_a_key_is_an_error_that_names_it(line: str) -> None:
    with pytest.raises(InvalidInputError, match="line 2: "):
        as_trust([f"bob {PUBLIC}", line])


@pytest.mark.parametrize("wrong", [5, None, [5], b"ssh-ed25519 AAAA", [], ["# nothing"], object()])
def test_what_says_nobody_to_trust_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInputError):
        as_trust(wrong)


def test_files_of_trust_and_of_revoked_keys(tmp_path: Path) -> None:
    allowed, revoked, krl = tmp_path / "allowed", tmp_path / "revoked", tmp_path / "krl"
    allowed.write_text(f"ann {PUBLIC}\nrsa {public_line('rsa')}\n")
    revoked.write_text(f"# stolen\n{PUBLIC}\n")
    subprocess.run(["ssh-keygen", "-q", "-k", "-f", krl, revoked], check=True)
    for file in (revoked, krl):
        found = Trust.load(allowed, revoked=file).verdict(BLOB, MESSAGE, time_s=DAY_S)
        assert (found.verdict, found.reason) == (Verdict.REVOKED, "its key is revoked")
    other = Trust.load(allowed, revoked=krl).verdict(blob_of("rsa"), MESSAGE, time_s=DAY_S)
    assert (other.verdict, other.signers) == (Verdict.GOOD, ("rsa",))
    allowed.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInputError, match="no file of trusted keys"):
        Trust.load(allowed)


# --- verdicts ---------------------------------------------------------------------------------


def test_a_signature_for_another_namespace_or_by_another_key_is_told_apart() -> None:
    found = as_trust(PUBLIC).verdict(blob_of("ed25519", "git"), MESSAGE, time_s=DAY_S)
    assert (found.verdict, "namespace" in found.reason) == (Verdict.BAD, True)
    found = as_trust(PUBLIC).verdict(blob_of("ecdsa256"), MESSAGE, time_s=DAY_S)
    assert (found.verdict, found.reason) == (Verdict.UNTRUSTED, "its key is of nobody who is trusted")
    assert verdict(f"ann {PUBLIC}", None) is Verdict.UNSIGNED


@pytest.mark.parametrize("time_s", [-1e9, 1e300, float("nan"), float("inf")])
def test_a_time_that_no_calendar_has_makes_no_signature_good(time_s: float) -> None:
    assert verdict(f"ann {PUBLIC}", time_s=time_s) is Verdict.UNTRUSTED


def test_two_signatures_one_cut_short_and_one_that_names_another_key_are_bad_ones() -> None:
    rsa = blob_of("rsa")
    end = 14 + int.from_bytes(rsa[10:14], "big")
    named_as = BLOB[:10] + rsa[10:end] + BLOB[14 + int.from_bytes(BLOB[10:14], "big") :]
    for bad in (BLOB + BLOB, BLOB + b"\0", b"", b"SSHSIG", named_as, bytes(20_000), BLOB[:-1], BLOB[:100], BLOB[:20]):
        assert verdict(f"ann {PUBLIC}", bad) is Verdict.BAD
        assert verdict(f"rsa {public_line('rsa')}", bad) is Verdict.BAD


@pytest.mark.parametrize("at", range(0, len(BLOB), 23))
def test_no_other_bytes_than_the_signature_are_a_good_one(at: int) -> None:
    changed = bytearray(BLOB)
    changed[at] ^= 4
    assert verdict(f"ann {PUBLIC}", bytes(changed)) in (Verdict.BAD, Verdict.UNTRUSTED)


@pytest.mark.parametrize("at", range(1, 4))
def test_bytes_that_are_described_have_a_verdict_which_is_not_good(at: int) -> None:
    """Whatever follows the key, of which `described` is not the judge."""
    tail = random.Random(at).randbytes(len(BLOB) // 2)
    for blob in (BLOB[: -len(tail)] + tail, BLOB[: len(BLOB) * at // 4] + tail):
        described(blob)
        assert verdict(f"ann {PUBLIC}", blob) in (Verdict.BAD, Verdict.UNTRUSTED)


@given(st.binary(max_size=300))
def test_any_bytes_at_all_are_described(blob: bytes) -> None:
    for each in (blob, BLOB[:10] + blob):
        described(each)


@given(st.text(max_size=120))
def test_any_text_is_trust_or_an_error_of_ours(text: str) -> None:
    for line in (text, f"ann {text} {PUBLIC}", f"{text} {PUBLIC}"):
        try:
            kept = parse_signers([line])
        except CkptError:
            continue
        assert len(kept) == 1 and "\n" not in kept[0]


def test_nothing_of_a_verdict_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert verdict(f"ann {PUBLIC}") is Verdict.GOOD
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(StorageError, match="cannot be verified"):
        verdict(f"ann {PUBLIC}")
