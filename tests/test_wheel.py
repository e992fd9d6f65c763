"""What a user gets: the wheel, installed in an environment of its own, away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [place for place in sys.path if place.endswith("site-packages")]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(*command: str | Path, cwd: Path, **more: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CAS_CKPT"))}
    done = subprocess.run(command, cwd=cwd, env=kept | more, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    build = "import sys, setuptools.build_meta as build; build.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, folder, cwd=ROOT)
    return next(folder.glob("cas_ckpt-*.tar.gz"))


def wheel_of(sources: Path, folder: Path, **environment: str) -> Path:
    """From the sources as they are handed out: a build in the checkout would find what earlier ones left."""
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    run(sys.executable, *build, sources, cwd=folder, **environment)
    return next(folder.glob("cas_ckpt-*.whl"))


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(sources, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel: Path) -> Path:
    """An environment with the wheel; what it depends on is borrowed from the one that runs the tests."""
    folder = wheel.parent / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=wheel.parent)
    install = ("-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet", "--no-deps", "--no-index")
    run(sys.executable, *install, wheel, cwd=wheel.parent)
    # A path in a .pth file is searched, but the .pth files that lie there (the editable install) are not read.
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "borrowed.pth").write_text("\n".join(PACKAGES) + "\n")
    return folder


def test_the_wheel_holds_types_and_migrations_and_nothing_of_the_workshop(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"cas_ckpt/py.typed", "cas_ckpt/migrations/env.py"} <= set(names)
    assert any(name.startswith("cas_ckpt/migrations/versions/0001") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"cas_ckpt"}
    assert [name for name in names if name.endswith((".pyc", ".c", ".h", ".S"))] == []


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_one_wheel_with_the_native_core_serves_every_python(environment: Path, wheel: Path) -> None:
    assert "cas_ckpt/_native.abi3.so" in zipfile.ZipFile(wheel).namelist()
    assert "-cp311-abi3-linux_" in wheel.name
    assert "(native core: " in run(environment / "bin" / "cas-ckpt", "--version", cwd=wheel.parent)


def test_without_a_compiler_there_is_a_wheel_without_the_native_core(sources: Path, tmp_path: Path) -> None:
    wheel = wheel_of(sources, tmp_path, PATH=str(tmp_path), CC="", CXX="")
    zipfile.ZipFile(wheel).extractall(tmp_path / "there")
    names = zipfile.ZipFile(wheel).namelist()
    assert "cas_ckpt/native.py" in names and not any(name.endswith(".so") for name in names)
    # -S: the .pth files, that of the editable install among them, are not read.
    program = ("-S", "-m", "cas_ckpt", "--version")
    version = run(sys.executable, *program, cwd=tmp_path / "there", PYTHONPATH=os.pathsep.join(PACKAGES))
    assert "(no native core: it is not there" in version


def test_the_installed_package_makes_a_repository_and_shows_its_log(environment: Path, tmp_path: Path) -> None:
    cas_ckpt = environment / "bin" / "cas-ckpt"
    run(cas_ckpt, "init", "runs", cwd=tmp_path)
    commit = "cas_ckpt.Repository.open('runs').commit({'a': 1}, message='hi')"
    script = f"import cas_ckpt; print(cas_ckpt.__file__); {commit}"
    imported_from = run(environment / "bin" / "python", "-c", script, cwd=tmp_path).strip()
    assert Path(imported_from).is_relative_to(environment)
    assert "hi" in run(cas_ckpt, "-C", "runs", "log", cwd=tmp_path)


def test_the_version_is_the_same_everywhere(environment: Path, wheel: Path, tmp_path: Path) -> None:
    script = "import cas_ckpt; print(cas_ckpt.__version__)"
    version = run(environment / "bin" / "python", "-c", script, cwd=tmp_path).strip()
    assert wheel.name.split("-")[1] == version
