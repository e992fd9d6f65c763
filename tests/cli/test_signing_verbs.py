"""verify, signers, --sign, --trust and log --show-signature on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cas_ckpt import Repository
from cas_ckpt.cli.main import main
from tests.signing.keys import KEYS, public_line

KEY = KEYS["ed25519"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an unsigned and a signed commit, keys, and files of trust."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAS_CKPT_REPO", "repo")
    monkeypatch.delenv("CAS_CKPT_TRUST", raising=False)
    for name in ("ed25519", "rsa"):
        Path(name).touch(mode=0o600)
        Path(name).write_text(KEYS[name]["private"])
        Path(f"{name}.pub").write_text(KEYS[name]["public"])
    Path("allowed").write_text(f"ann@lab.org {public_line()}\n")
    save_file({"w": np.zeros(300)}, "m.safetensors")
    Repository.init("repo", group=None).close()
    assert main(["-q", "import", "m.safetensors", "-m", "first"]) == 0
    assert main(["-q", "import", "m.safetensors", "-m", "second", "--onto", "main", "--sign", "ed25519"]) == 0
    return tmp_path


def test_verify_says_who_signed_and_ends_with_17_if_nobody_trusted_did(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["verify", "main", "--trust", "allowed"]) == 0
    shown = capsys.readouterr().out
    assert f"good signature of ann@lab.org (ssh-ed25519 {KEY['fingerprint']})" in shown and "second" in shown
    assert main(["verify", "main~1", "--trust", "allowed"]) == 17
    assert "unsigned: it is not signed" in capsys.readouterr().out
    assert main(["verify", "main", "--trust", "rsa.pub"]) == 17
    assert main(["verify", "main", "--trust", "rsa.pub", "--trust", KEY["public"]]) == 0
    assert main(["verify", "main", "--history", "--trust", "allowed"]) == 17
    assert main(["verify", "main", "--trust", "allowed", "--revoked", "ed25519.pub"]) == 17
    capsys.readouterr()
    assert main(["verify", "main", "--history", "--trust", "allowed", "--json"]) == 17
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert [each["signature"]["verdict"] for each in found["commits"]] == ["good", "unsigned"]


def test_verify_without_somebody_to_trust_is_a_wrong_call(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["verify", "main"]) == 2
    assert main(["verify", "main", "--revoked", "ed25519.pub"]) == 2
    assert main(["verify", "main", "--trust", "m.safetensors"]) == 2
    assert main(["verify", "main", "--trust", "nothing"]) == 1
    monkeypatch.setenv("CAS_CKPT_TRUST", "allowed")
    assert main(["verify", "main"]) == 0


def test_what_verify_writes_is_what_ssh_keygen_takes(home: Path) -> None:
    assert main(["verify", "main", "--trust", "allowed", "--write", "out"]) == 0
    assert Path("out.sig").read_text().startswith("-----BEGIN SSH SIGNATURE-----\n")
    assert Path("out.bytes").read_bytes()[1:8] == b"\xa6commit"
    assert main(["verify", "main", "--trust", "allowed", "--write", "out"]) == 14
    assert main(["verify", "main~1", "--trust", "allowed", "--write", "other"]) == 15


def test_log_and_show_say_whose_signature_there_is(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["tag", "v1", "-m", "out", "--sign", "ed25519"])
    capsys.readouterr()
    assert main(["log", "--show-signature", "--trust", "allowed"]) == 0
    shown = capsys.readouterr().out
    assert "Signed:  good signature of ann@lab.org" in shown and "Signed:  unsigned" in shown
    assert main(["log", "--show-signature", "--json"]) == 0
    verdicts = [each["signature"]["verdict"] for each in json.loads(capsys.readouterr().out)]
    assert verdicts == ["untrusted", "unsigned"]
    assert main(["show"]) == 0
    shown = capsys.readouterr().out
    assert f"Signed:  commit: untrusted: not verified (ssh-ed25519 {KEY['fingerprint']})" in shown
    assert "Signed:  refs/tags/v1: untrusted" in shown
    assert main(["show", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["signatures"]) == {"commit", "refs/tags/v1"}


def test_files_are_written_only_of_what_is_signed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["export", "main~1", "out.safetensors", "--trust", "allowed"]) == 17
    assert main(["checkout", "main~1", "--to", "out.safetensors", "--trust", "allowed"]) == 17
    assert main(["read", "main~1", "w", "--trust", "allowed"]) == 17
    assert not Path("out.safetensors").exists()
    assert main(["-q", "export", "main", "out.safetensors", "--trust", "allowed"]) == 0
    monkeypatch.setenv("CAS_CKPT_TRUST", "rsa.pub")
    assert main(["-q", "export", "main", "out.safetensors", "--force"]) == 17


def test_branches_that_take_signed_commits_only(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["signers", "set", "main"]) == 2
    assert main(["signers", "set", "main", "--trust", "allowed"]) == 0
    capsys.readouterr()
    assert main(["import", "m.safetensors", "--onto", "main"]) == 17
    assert "cas-ckpt signers show (--sign KEYFILE)" in capsys.readouterr().err
    assert main(["-q", "import", "m.safetensors", "--onto", "main", "--sign", "ed25519"]) == 0
    capsys.readouterr()
    assert main(["signers", "show"]) == 0
    assert capsys.readouterr().out == f"main  ann@lab.org {public_line()}\n"
    assert main(["signers", "clear", "other"]) == 15
    assert main(["signers", "clear"]) == 0
    assert capsys.readouterr().out == "every branch takes any commit\n"


def test_a_key_that_does_not_sign_is_a_wrong_call(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken").touch(mode=0o600)
    assert main(["tag", "v1", "--sign", "broken"]) == 2
    assert "does not sign" in capsys.readouterr().err
    assert main(["tag", "--sign", "ed25519"]) == 2
