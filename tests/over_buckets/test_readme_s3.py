"""The README's main example, with a bucket in the place of its folder."""

from __future__ import annotations

import pytest

from cas_ckpt import Repository
from tests.servers import S3Server
from tests.test_docs import ROOT, blocks


def test_the_main_example_works_on_a_bucket(s3: S3Server, capsys: pytest.CaptureFixture[str]) -> None:
    url = s3.url(s3.new_bucket(), "ckpts")
    program = blocks(ROOT / "README.md", "python")[0]
    assert '"runs/ckpts"' in program
    for runs in (1, 2):  # it begins, then resumes
        exec(compile(program.replace('"runs/ckpts"', repr(url)), "README.md", "exec"), {})
        with Repository.open(url, read_only=True) as repo:
            assert len(list(repo.log("main"))) == runs
            assert repo.read("main", "model/weight").shape == (1024, 1024)
    assert len(capsys.readouterr().out.splitlines()) == 2
