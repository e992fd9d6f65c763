"""The rules of the house that no linter knows, kept by reading the source.

Every rule is shown a line that breaks it first: a rule that cannot object is no rule.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from cas_ckpt.training.torch_internals import ATTRIBUTES, NAMES, OVERRIDDEN

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cas_ckpt"
FOLDERS = ("cas_ckpt", "migrations", "tests", "benchmarks", "examples")
VAGUE_NAMES = frozenset({"utils", "util", "helpers", "helper", "common", "manager", "misc"})
UNTYPED_ERRORS = frozenset({"RuntimeError", "Exception", "BaseException", "AssertionError"})
CLOUD_SDKS = frozenset({"boto3", "botocore", "google", "gcsfs", "s3fs", "obstore"})


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def source_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Every node; a tree is walked once for all rules."""
    return tuple(ast.walk(tree))


@cache
def imported_modules(tree: ast.AST) -> tuple[str, ...]:
    """Dotted names of all that is imported, also inside functions; `from a import b` gives a and a.b."""
    return tuple(_imported_modules(tree))


def _imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imports_of(*names: str) -> Callable[[ast.AST], list[str]]:
    """A rule that objects to importing any of the modules, or anything below them."""

    def check(tree: ast.AST) -> list[str]:
        return [found for found in imported_modules(tree) if any(f"{found}.".startswith(f"{name}.") for name in names)]

    return check


def dotted(node: ast.AST) -> str:
    """`a.b.c` for an attribute chain; a part that is no name reads as `?`."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


@cache
def names_used(tree: ast.AST) -> tuple[str, ...]:
    """Names and attribute chains that are read, and what `from x import y` brings in."""
    names = (dotted(node) for node in nodes_of(tree) if isinstance(node, (ast.Attribute, ast.Name)))
    return (*names, *imported_modules(tree))


def reads_the_environment(tree: ast.AST) -> list[str]:
    names = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv"}
    return [name for name in names_used(tree) if name in names]


def reads_the_time(tree: ast.AST) -> list[str]:
    ends = (".now", ".utcnow", ".today")
    clocks = [name for name in names_used(tree) if name.startswith(("datetime.", "date.")) and name.endswith(ends)]
    return imports_of("time")(tree) + clocks


def starts_threads(tree: ast.AST) -> list[str]:
    starters = {"threading.Thread", "threading.Timer", "_thread.start_new_thread"}
    found = [name for name in names_used(tree) if name in starters]
    return found + imports_of("concurrent", "multiprocessing", "asyncio")(tree)


def raises_untyped_errors(tree: ast.AST) -> list[str]:
    raised = [node.exc for node in nodes_of(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    names = [dotted(error.func if isinstance(error, ast.Call) else error) for error in raised]
    return [name for name in names if name in UNTYPED_ERRORS]


def prints(tree: ast.AST) -> list[str]:
    return [name for name in names_used(tree) if name in {"print", "sys.stdout", "sys.stderr"}]


def gives_command_lines(tree: ast.AST) -> list[str]:
    """Texts, docstrings aside, that speak to a shell, but for commands that are said to be for the command line."""
    docstrings = {id(node.value) for node in nodes_of(tree) if isinstance(node, ast.Expr)}
    texts = [node for node in nodes_of(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    told = [
        re.sub(r"on the command line[:,] cas-ckpt [^;.]*", "", str(text.value))
        for text in texts if id(text) not in docstrings
    ]  # fmt: skip
    return [text for text in told if re.search(r"cas-ckpt |(?<![\w-])--[a-z]", text)]


@cache
def own_names() -> frozenset[str]:
    """Names that the package defines: functions, classes, arguments, variables and attributes."""
    names: set[str] = set()
    for path in source_files("cas_ckpt"):
        for node in nodes_of(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
                names.add(node.attr)
    return frozenset(names)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


TORCHS_OWN = frozenset(name.rpartition(".")[2] for name in {*NAMES, *ATTRIBUTES}) | {*OVERRIDDEN}
NOT_OF_TORCH = ("sys.", "pickle.", "np.", "os.", "numpy.", "ctypes.")


def private_names_of_torch(tree: ast.AST) -> list[str]:
    """Imports of torch's private modules and names, and private attributes that are not of the package itself.

    Names of another module that are private here too count where they are asked of anything but `self`.
    """
    imports = [name for name in imported_modules(tree) if name.split(".")[0] == "torch"]
    found = [name for name in imports if any(map(is_private, name.split(".")))]
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            name = dotted(node)
            is_own = node.attr in own_names() and (node.attr not in TORCHS_OWN or name.startswith("self."))
            if not is_own and not name.startswith(NOT_OF_TORCH):
                found.append(name)
        elif isinstance(node, ast.FunctionDef) and node.name in OVERRIDDEN:
            found.append(node.name)
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            named = node.args[1]
            if isinstance(named, ast.Constant) and is_private(str(named.value)) and named.value not in own_names():
                found.append(f"{dotted(node.func)} of {named.value}")
    return found


COMMANDS_ARE_DATA = (
    "cli", "ops/fsck", "ops/commit/request.py",
)  # fmt: skip
"""Reports of fsck and repair hold commands for a shell, as data; the provenance of a commit comes from git."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that only some places may do.

    Attributes:
        broken: A line that breaks the rule.
        allowed: Folders or files of the package, relative to it, that may.
    """

    name: str
    check: Callable[[ast.AST], list[str]]
    broken: str
    allowed: tuple[str, ...] = ()

    def applies_to(self, path: Path) -> bool:
        inside = path.relative_to(PACKAGE).as_posix()
        return not any(inside == place or inside.startswith(f"{place}/") for place in self.allowed)


MAY_START_THREADS = ("parallel", "testing", "storage/object_parts.py")

RULES = (
    Rule("only training, dcp, formats and adapters import torch", imports_of("torch"),
         "def f():\n    from torch import nn", ("training", "dcp", "formats", "integrations", "torchsnapshot")),
    Rule("only index imports sqlalchemy", imports_of("sqlalchemy", "alembic"), "import sqlalchemy.orm", ("index",)),
    Rule("ssh-keygen does what is done with keys", imports_of("cryptography", "bcrypt"), "import cryptography.x509"),
    Rule("only stores import cloud SDKs", imports_of(*CLOUD_SDKS), "import boto3", ("storage",)),
    Rule("only the CLI reads the environment", reads_the_environment, "import os\nos.environ['HOME']",
         ("cli", "native.py")),
    Rule("only clock.py reads the time", reads_the_time, "import datetime\ndatetime.datetime.now()", ("clock.py",)),
    Rule("nobody imports time but clock.py", reads_the_time, "from time import monotonic", ("clock.py",)),
    Rule("threads start in parallel, and for the parts of one value", starts_threads,
         "import threading\nthreading.Thread()", MAY_START_THREADS),
    Rule("executors too", starts_threads, "from concurrent.futures import ThreadPoolExecutor", MAY_START_THREADS),
    Rule("messages of the library speak Python", gives_command_lines,
         "raise KeyError('no entry: cas-ckpt ls lists the keys')", COMMANDS_ARE_DATA),
    Rule("options of the shell are no Python", gives_command_lines, "raise KeyError(f'{1} is there: --force moves it')",
         COMMANDS_ARE_DATA),
    Rule("errors are typed", raises_untyped_errors, "raise RuntimeError('no')"),
    Rule("bare classes count as well", raises_untyped_errors, "raise Exception"),
    # progress.py: what `progress=True` asks for, nothing by itself.
    Rule("only the CLI prints", prints, "print('hello')", ("cli", "__main__.py", "progress.py")),
    Rule("nobody else writes to the terminal", prints, "import sys\nsys.stderr.write('x')",
         ("cli", "__main__.py", "progress.py")),
    Rule("pickle stays with the values that need leave", imports_of("pickle", "dill", "cloudpickle"), "import pickle",
         ("objects/values.py", "formats/dcp_export.py",
          "parallel/child_process.py", "formats/pickles.py")),  # what its unpickler may call is on a list
    Rule("torch's private names have one home", private_names_of_torch, "import torch\ntorch._neg_view(tensor)",
         ("training/torch_internals.py", "storage", "transfer", "parallel")),  # the rooms below know no torch
    Rule("torch.load never runs a pickle's code", lambda tree: unsafe_loads(tree), "torch.load(path)"),
)  # fmt: skip


def unsafe_loads(tree: ast.AST) -> list[str]:
    calls = [node for node in nodes_of(tree) if isinstance(node, ast.Call) and dotted(node.func) == "torch.load"]
    return [f"torch.load in line {call.lineno}" for call in calls if not is_weights_only(call)]


def is_weights_only(call: ast.Call) -> bool:
    given = [word.value for word in call.keywords if word.arg == "weights_only"]
    return len(given) == 1 and isinstance(given[0], ast.Constant) and given[0].value is True


def rule_name(rule: Rule) -> str:
    return rule.name.replace(" ", "-")


@pytest.mark.parametrize("rule", RULES, ids=rule_name)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    files = [path for path in source_files("cas_ckpt") if rule.applies_to(path)]
    broken = {str(path.relative_to(ROOT)): rule.check(parsed(path)) for path in files}
    assert {path: found for path, found in broken.items() if found} == {}


@pytest.mark.parametrize("rule", RULES, ids=rule_name)
def test_the_rule_objects_to_a_line_that_breaks_it(rule: Rule) -> None:
    assert rule.check(ast.parse(rule.broken))


@pytest.mark.parametrize(
    "broken",
    [
        "from torch.distributed.checkpoint._traverse import traverse_state_dict",
        "def f(tensor):\n    return tensor._version",
        "def f(names, module):\n    return names._modules, module._modules",  # of which one is our own
        "def f(tensor):\n    return hasattr(tensor, '_typed_storage')",
        "def f(self):\n    return self._deepcopy_dispatch",
    ],
)
def test_a_private_name_of_torch_is_found_however_it_is_asked_for(broken: str) -> None:
    assert private_names_of_torch(ast.parse(broken))


def test_the_words_of_a_rule_are_no_offence_elsewhere() -> None:
    harmless = "import datetime\nimport threading\nx: datetime.time\nthreading.Lock()\nraise InvalidInputError('no')"
    assert [found for rule in RULES for found in rule.check(ast.parse(harmless))] == []


def test_migrations_import_nothing_of_the_package_but_the_schema() -> None:
    trees = [parsed(path) for path in source_files("migrations")]
    ours = {name for tree in trees for name in imported_modules(tree) if name.startswith("cas_ckpt")}
    assert {name for name in ours if not name.startswith("cas_ckpt.index")} == set()


# ---------------------------------------------------------------- layers


def layers() -> list[list[str]]:
    """The rooms from the top, as pyproject.toml gives them to import-linter."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    return [[name.strip("() ") for name in row.replace(":", "|").split("|")] for row in rows]


@cache
def heights() -> dict[str, int]:
    rows = layers()
    return {name: len(rows) - at for at, row in enumerate(rows) for name in row}


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def upward_imports(module: str, tree: ast.AST, height: dict[str, int]) -> list[str]:
    """Imports of a higher room, or of a sibling, made by a module."""
    own = room_of(module)
    found = {name for name in imported_modules(tree) if room_of(name) in height and room_of(name) != own}
    return sorted(name for name in found if height[room_of(name)] > height[own] or are_siblings(own, room_of(name)))


@cache
def are_siblings(own: str, other: str) -> bool:
    """Folders on one level are closed to one another; files beside one another are not."""
    are_folders = all((ROOT / name.replace(".", "/")).is_dir() for name in (own, other))
    return are_folders and heights()[own] == heights()[other]


def test_a_room_imports_only_rooms_below_it() -> None:
    height = heights()
    modules = {module_name(path): parsed(path) for path in source_files("cas_ckpt")}
    upward = {name: upward_imports(name, tree, height) for name, tree in modules.items() if name != "cas_ckpt"}
    assert {name: found for name, found in upward.items() if found} == {}


def test_an_import_of_a_higher_room_or_a_sibling_is_found() -> None:
    source = ast.parse("from cas_ckpt.ops.commit import commit_tree\nfrom cas_ckpt import index, objects")
    found = upward_imports("cas_ckpt.transfer.save", source, heights())
    assert found == ["cas_ckpt.index", "cas_ckpt.ops.commit", "cas_ckpt.ops.commit.commit_tree"]


def test_every_room_has_its_layer() -> None:
    modules = [module_name(path) for path in source_files("cas_ckpt")]
    assert {room_of(module) for module in modules} - set(heights()) - {"cas_ckpt"} == set()


# ---------------------------------------------------------------- files


def test_no_module_has_a_name_that_says_nothing() -> None:
    parts = {part for path in source_files(*FOLDERS) for part in path.relative_to(ROOT).with_suffix("").parts}
    assert parts & VAGUE_NAMES == set()


def test_every_module_says_its_duty() -> None:
    trees = {str(path.relative_to(ROOT)): parsed(path) for path in source_files(*FOLDERS)}
    silent = [path for path, tree in trees.items() if tree.body and ast.get_docstring(tree) is None]
    assert silent == []


def test_the_docstring_of_a_room_names_each_of_its_modules_and_no_module_that_is_gone() -> None:
    rooms = [path for path in source_files("cas_ckpt") if path.name == "__init__.py" and path.parent != PACKAGE]
    for room in rooms:
        docstring = ast.get_docstring(parsed(room)) or ""
        named = set(re.findall(r"(?<![\w/])\w+\.py\b", docstring))  # a module of another room has its folder with it
        own = {path.name for path in room.parent.glob("*.py")} - {"__init__.py"}
        inner = {f"{path.parent.name}/" for path in room.parent.glob("*/__init__.py")}
        assert named == own, room
        assert {name for name in inner if name not in docstring} == set(), room


def test_no_source_names_a_package_registry() -> None:
    files = [ROOT / "Makefile", ROOT / ".ci" / "run", ROOT / "pyproject.toml", *ROOT.glob("requirements*.txt")]
    assert [path.name for path in files if "--index-url" in path.read_text() or "://" in path.read_text()] == []
