"""The recipes of docs/adding.md do what they say: what they show is put in its place and used."""

from __future__ import annotations
import __future__

import importlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zlib
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cas_ckpt import Repository
from cas_ckpt.cli import main
from cas_ckpt.objects import codec
from cas_ckpt.storage.url import SCHEMES, open_store
from cas_ckpt.testing.store_suite import ConditionChecks
from examples.toy_store import open_toy
from tests.cli.running import call

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding.md").read_text()


def shown(path: str) -> str:
    """The block that the page has for a file."""
    found = re.search(rf"^```python\n# {re.escape(path)}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found, path
    return textwrap.dedent(found[1])


def row(name: str, names: dict[str, Any]) -> Any:
    """The value in the row that the page has for a table of the source."""
    found = re.search(rf'`"{name}": (.*?),`', PAGE)
    assert found, name
    return eval(found[1], names)


def run(path: str, module: ModuleType | None = None) -> dict[str, Any]:
    """The names that a block defines, where it stands in `module`, or by itself."""
    names = dict(vars(module)) if module else {"__name__": path}
    exec(compile(shown(path), path, "exec", __future__.annotations.compiler_flag), names)
    return names


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setitem(SCHEMES, "toy", row("toy", {"open_toy": open_toy}))
    return f"toy://{tmp_path}/values"


def test_the_store_keeps_conditions_and_holds_a_repository(toy: str) -> None:
    """All checks of the suite take five seconds; races and swaps are what a repository cannot show."""
    kind = run("tests/storage/test_toy_store.py")["TestToyStore"]
    for name in vars(ConditionChecks):
        if name.startswith("test_") and "refused" not in name:
            suite = kind()
            suite.url = toy
            getattr(suite, name)()
    with Repository.init(toy) as repo:
        first = repo.commit({"w": np.arange(5000.0), "empty": np.zeros(0)})
        repo.commit({"w": np.ones(5000)})
        repo.gc()
    with Repository.open(toy) as repo:
        assert repo.load(first.id)["w"].tolist() == list(range(5000))
        assert repo.fsck(read_data=True).ok
    assert open_store(toy).url == toy


def pyproject() -> str:
    """That of a package with a store, as the page has it."""
    (found,) = re.findall(r"^```toml\n# pyproject.toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def installed_of(source: Path, project: str) -> Path:
    """Where the package whose modules are in `source` is installed, by pip."""
    installed = source.with_name("installed")
    (source / "pyproject.toml").write_text(project)
    pip = ["pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target", installed, source]
    subprocess.run([sys.executable, "-m", *pip], check=True)
    return installed


def another(installed: Path) -> Path:
    """The same package once more, called otherwise; its folder."""
    second = installed / "another-1.0.dist-info"
    shutil.copytree(next(installed.glob("cas_ckpt_toy-*.dist-info")), second)
    (second / "METADATA").write_text("Metadata-Version: 2.1\nName: another\nVersion: 1.0\n")
    return second


@pytest.mark.slow
def test_a_store_of_another_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(ROOT / "examples" / "toy_store.py", source)
    installed = installed_of(source, pyproject())
    url = f"toy://{tmp_path}/values"

    def cas_ckpt(*words: str, path: Path = installed) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cas_ckpt", *words]
        place = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
        return subprocess.run(command, env=place, capture_output=True, text=True)

    made = cas_ckpt("init", url)
    assert made.returncode == 0, made.stderr
    assert cas_ckpt("-C", url, "status").returncode == 0
    refused = cas_ckpt("-C", url.replace("toy", "tin", 1), "status")
    assert "no store for 'tin'; known are a path, file://" in refused.stderr and "gs://, toy://" in refused.stderr
    assert "no store for 'toy'" in cas_ckpt("-C", url, "status", path=tmp_path).stderr  # not installed
    second = another(installed)
    assert "the packages another and cas-ckpt-toy have a store for 'toy'" in cas_ckpt("-C", url, "status").stderr
    shutil.rmtree(second)
    assert "a URL has '://'" in cas_ckpt("init", "toy:/values").stderr
    for source, told in (  # each of another length: Python takes a file of one length and second for the same
        ("import a_module_that_nobody_has", "of the package cas-ckpt-toy cannot be imported: No module"),
        ("raise RuntimeError('no driver here')", "of the package cas-ckpt-toy cannot be imported: no driver here"),
        ("open_toy = lambda url: None", "the package cas-ckpt-toy opens a NoneType, which is no store"),
    ):
        (installed / "toy_store.py").write_text(source)
        assert told in cas_ckpt("-C", url, "status").stderr


def test_the_verb_goes_by_both_doors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path, name in (("ops/history/log", "first_commits"), ("repository/commits", "first"), ("cli/history", "first")):
        module = importlib.import_module(f"cas_ckpt.{path.replace('/', '.')}")
        made = run(f"cas_ckpt/{path}.py", module)[name]
        monkeypatch.setattr(Repository if path.startswith("rep") else module, name, made, raising=False)
    monkeypatch.setitem(main.PLACES, "first", row("first", vars(main)))
    names = run("tests/cli/test_first.py")
    names["test_a_history_begins_with_the_commits_without_parents"](tmp_path)
    assert call("first", "--help").code == 0


def test_the_encoding_comes_back_and_refuses_what_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = IntEnum("Encoding", {**codec.Encoding.__members__, "ZLIB": 5})  # type: ignore[misc]
    monkeypatch.setattr(codec, "Encoding", numbers)
    monkeypatch.setattr(codec, "zlib", zlib, raising=False)
    names = run("cas_ckpt/objects/codec.py", codec)
    monkeypatch.setitem(codec.CODECS, "zlib", row("zlib", names))
    data = np.arange(2000).tobytes()
    made = codec.encode_extent(data, policy="zlib", item_bytes=4)  # type: ignore[arg-type]
    assert made.encoding == 5 and len(made.payload) < len(data)
    assert codec.decode_extent(5, made.payload, num_bytes=len(data)) == data
    tests = importlib.import_module("tests.objects.test_codec")
    monkeypatch.setattr(tests, "Encoding", numbers)
    monkeypatch.setattr(tests, "zlib", zlib, raising=False)
    refuses = run("tests/objects/test_codec.py", tests)["test_a_zlib_stream_that_is_not_of_that_length_is_corrupt"]
    [marked] = refuses.pytestmark
    for broken in marked.args[1]:
        refuses(broken)


WITH_IT = """
import sys
import numpy as np
from cas_ckpt import Repository

def main():
    data = np.tile(np.arange(250, dtype=np.uint8), 40_000)
    with Repository.init(sys.argv[1], encoding="zlib", group=None) as repo:
        repo.commit({"x": data, "y": data + 1, "name": "toy"})
        repo.commit_async({"x": data[::-1].copy(), "y": data, "name": "toy"}, worker="process").result()
        encoded = "SELECT encoding, sum(num_bytes), sum(stored_bytes) FROM locations WHERE kind = 'chunk' GROUP BY 1"
        ((encoding, plain, stored),) = repo.sql(encoded)
        assert encoding is None and stored < plain / 20
        repo.forget(revisions="main~1")
        repo.gc(min_age_s=0)
        repo.repack()
        Repository.init(sys.argv[2], group=None).close()
        repo.push(sys.argv[2])
        assert repo.fsck(read_data=True).ok
    with Repository.clone(sys.argv[2], sys.argv[3]) as clone:
        assert clone.fsck(read_data=True).ok and (clone.load("main")["x"] == data[::-1]).all()

if __name__ == "__main__":
    main()
"""

WITHOUT_IT = """
import sys
from cas_ckpt import Repository, UnsupportedVersionError

with Repository.open(sys.argv[1], group=None) as repo:
    assert repo.fsck(read_data=True).ok and repo.load("main", keys=["name"]) == {"name": "toy"}
    for call in (lambda: repo.load("main"), lambda: repo.commit({}), lambda: repo.push(sys.argv[2])):
        try:
            call()
        except UnsupportedVersionError as error:
            print(error)
"""


@pytest.mark.slow
def test_an_encoding_of_another_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "zlib_encoding.py").write_text(shown("zlib_encoding.py"))
    (points,) = re.findall(
        r'^```toml\n(\[project.entry-points."cas_ckpt.encodings".*?)^```', PAGE, re.MULTILINE | re.DOTALL
    )
    project = re.sub(r"\[project.entry-points.*?\n\n", f"{points}\n", pyproject(), flags=re.DOTALL)
    installed = installed_of(source, project.replace("toy_store", "zlib_encoding"))
    program, url = tmp_path / "program.py", str(tmp_path / "repo")

    def python(text: str, *words: str, path: Path = installed) -> str:
        """What a program printed."""
        program.write_text(text)
        place = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
        ran = subprocess.run([sys.executable, program, *words], env=place, capture_output=True, text=True)
        return ran.stdout + ran.stderr

    assert python(WITH_IT, url, f"{tmp_path}/pushed", f"{tmp_path}/cloned") == ""
    Repository.init(tmp_path / "third").close()
    read, write, copied = python(WITHOUT_IT, url, f"{tmp_path}/third", path=tmp_path).splitlines()
    assert "extent encoding 128 is not known" in read and "install the package that brings it" in read
    assert "are to be stored as 'zlib'" in write and "install the package that has this encoding" in write
    assert "extent encoding 128 is not known" in copied
    another(installed)
    assert "another and cas-ckpt-toy both have an encoding 'zlib'" in python(WITH_IT, f"{tmp_path}/fourth", "", "")


def test_the_adapter_resumes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = ModuleType("cas_ckpt.integrations.toy_trainer")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module).update(run("cas_ckpt/integrations/toy_trainer.py"))
    run("tests/frameworks/test_toy_trainer.py")["test_a_trainer_resumes_the_newest_step"](tmp_path)
