"""From the path of a snapshot to the repository that holds it, and its tag there.

    runs/a/step-10              the snapshot: a folder with one small file, `.snapshot_metadata`
    runs/a/.cas_ckpt            the repository of all snapshots in runs/a; the tag is "step-10"
    s3://bucket/a/step-10       likewise: s3://bucket/a/.cas_ckpt, the tag "step-10"; there is no file

The repository of a new snapshot in a folder, by the first of these that holds:

    1. the one that storage_options={"repository": ...} names
    2. the one that the snapshot at this path is in already
    3. the nearest `.cas_ckpt` beside it or further up: make one by hand where several folders are to share
    4. a new `.cas_ckpt` beside it; inside of it, where everybody may write beside it (/tmp), or this process may not

Everybody's folders do not count on the way up either: what somebody else put there is not ours to use.

The file names the repository and the commit, so that `os.path.exists` says whether a snapshot is there. A folder that
is moved with its repository or renamed still is the snapshot that it was, whatever is taken to its former path; a copy
is, until that path was taken to twice. It is written after the tag: where it is, the snapshot is whole.

Invariant: the same path gives the same tag, and two paths never share one. Must not know states.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from cas_ckpt.arguments import OnDivergence
from cas_ckpt.errors import InvalidInputError, StorageError
from cas_ckpt.formats.folders import OutputFiles
from cas_ckpt.torchsnapshot.failures import NotInSnapshotError

FILE_NAME = ".snapshot_metadata"
"""As torchsnapshot calls the file that it writes last."""

FOLDER_NAME = ".cas_ckpt"

_OWN_OPTIONS = ("repository", "index_url", "cache", "timeout_s", "allow_pickle", "on_divergence")
_PLAIN_PART = re.compile(r"[A-Za-z0-9_](?!.*\.\.)[A-Za-z0-9._-]*(?<!\.)(?<!\.ref)(?<!\.lock)")
_WHOLE_ID = re.compile(r"[0-9a-fA-F]{64}")
_MOST_CHARS = 120
_TAKEN = ("main", "HEAD", "refs", "odd")
"""First parts of tags that mean something else."""

RUN = "run-"
"""How branches begin that snapshots go to; no tag does."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a snapshot is.

    Attributes:
        path: As it was given, without "fs://".
        repository: Path or URL.
        tag: Of the snapshot's commit in it, as of the moment; where the next one goes.
        commit: What the file in the folder names; None: there is none, the tag counts.
        options: Arguments of `Repository.open`.
        allow_pickle: Values that cannot be expressed otherwise are pickled, and unpickled.
        on_divergence: What becomes of replicated values that differ, as in `CommitOptions`.
    """

    path: str
    repository: str
    tag: str
    options: Mapping[str, Any]
    allow_pickle: bool = False
    on_divergence: OnDivergence = "raise"
    commit: str | None = None

    @property
    def file(self) -> Path | None:
        """The file in the snapshot's folder; None: it is no folder of this computer."""
        return None if "://" in self.path else Path(self.path) / FILE_NAME


def place_of(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Place:
    """Where the snapshot at `path` is, or would be taken to.

    Raises:
        InvalidInputError: no path, or options that are not known.
        NotInSnapshotError: torchsnapshot itself wrote the snapshot there.
    """
    text = _text(path)
    options = dict(storage_options or {})
    own = {name: options.pop(name) for name in _OWN_OPTIONS if name in options}
    how = {name: own.pop(name) for name in ("allow_pickle", "on_divergence") if name in own}
    commit = None
    if "://" in text:
        repository, tag = _in_url(text, own.pop("repository", None), options)
    else:
        if options:
            raise InvalidInputError(
                f"storage_options has {next(iter(options))!r}; known for folders are {', '.join(_OWN_OPTIONS)}"
            )
        repository, tag, commit = _in_folder(Path(os.path.abspath(text)), own.pop("repository", None))
    return Place(text, repository, tag, own, commit=commit, **how)


def named_by_file(place: Place) -> str | None:
    """The commit that the file in the snapshot's folder names now."""
    try:
        found = None if place.file is None else _noted(Path(os.path.abspath(place.path)))
    except NotInSnapshotError:
        found = None
    return found and found[1]


def write_file(place: Place, commit: str) -> None:
    """Let the snapshot's folder say where its content is, a commit; durable when this returns.

    Raises:
        StorageError: it cannot be written.
    """
    file = place.file
    if file is None:
        return
    folder = Path(os.path.abspath(file.parent))
    named = place.repository if "://" in place.repository else os.path.relpath(place.repository, folder)
    record = {"version": "cas_ckpt", "repository": named, "commit": commit, "tag": place.tag, "manifest": {}}
    data = json.dumps(record, indent=2).encode()
    try:
        if file.exists() and file.read_bytes() == data:
            return
        with OutputFiles(folder, [FILE_NAME], force=True) as output, output.open(FILE_NAME) as out:
            out.write(data)
    except (OSError, StorageError) as error:
        raise StorageError(f"{file} cannot be written: {error}; the snapshot is the tag {place.tag!r} all the same, in "
                           f"{place.repository}") from error  # fmt: skip


def _text(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidInputError(f"path is {path!r:.80}: give the path or URL of a snapshot as text")
    return text.removeprefix("fs://")


def _in_url(url: str, repository: Any, settings: Mapping[str, Any]) -> tuple[str, str]:
    """The repository and the tag of a snapshot at a URL; `settings` go into the repository's URL."""
    address, _, query = url.partition("?")
    above, _, name = address.rstrip("/").rpartition("/")
    if not name or above.endswith("/"):
        raise InvalidInputError(f"{address!r:.200}: a snapshot has a name behind the bucket: give scheme://bucket/name")
    if repository is not None:
        return _repository(repository), tag_of(address.partition("://")[2].strip("/"))
    query = "&".join(
        part for part in (query, urlencode({name: str(value) for name, value in settings.items()})) if part
    )
    return f"{above}/{FOLDER_NAME}" + (f"?{query}" if query else ""), tag_of(name)


def _in_folder(path: Path, repository: Any) -> tuple[str, str, str | None]:
    """The repository, the tag and the commit of a snapshot in a folder."""
    found = _noted(path)
    if repository is not None:
        named = _repository(repository)
        return named, _tag_in(named, path), found[1] if found and found[0] == named else None
    if found is not None:
        return found[0], _tag_in(found[0], path), found[1]
    for above in (path, *path.parents):
        if (above / FOLDER_NAME).is_dir() and (above == path or not _is_everybodys(above)):
            break
    else:
        beside = path.parent
        is_ours = beside != path and beside.parent != beside and not _is_everybodys(beside) and _may_write(beside)
        above = beside if is_ours else path
    return str(above / FOLDER_NAME), _tag_in(str(above / FOLDER_NAME), path), None


def _tag_in(repository: str, path: Path) -> str:
    """The tag of a snapshot in a folder: its path from where the repository is; "." if that is the folder itself."""
    beside = None if "://" in repository else Path(os.path.abspath(repository)).parent
    is_beside = beside is not None and (beside == path or beside in path.parents)
    return tag_of(path.relative_to(beside).as_posix() if beside and is_beside else path.as_posix().strip("/"))


def _noted(path: Path) -> tuple[str, str] | None:
    """The repository and the commit that the file in the folder names; None: there is none.

    Raises:
        NotInSnapshotError: it is one of torchsnapshot.
    """
    file = path / FILE_NAME
    try:
        with file.open("rb") as opened:
            data = opened.read(1 << 16)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error}") from error
    try:
        record = json.loads(data)
        named, commit = record["repository"], record["commit"]
        if type(named) is not str or not _WHOLE_ID.fullmatch(commit):
            raise TypeError("names that are none")
    except (ValueError, TypeError, KeyError) as error:
        raise NotInSnapshotError(
            f"{file} was written by torchsnapshot, or is damaged: import it once, "
            f"cas_ckpt.torchsnapshot.import_snapshot({str(path)!r}, NEW_PATH), or take the snapshot to another path"
        ) from error
    return (named if "://" in named else os.path.normpath(path / named)), commit


def _repository(named: Any) -> str:
    if not isinstance(named, str | os.PathLike) or not os.fspath(named):
        raise InvalidInputError(f"storage_options['repository'] is {named!r:.80}: give a path or a URL")
    text = os.fsdecode(named)
    return text if "://" in text else os.path.abspath(text)


def _is_everybodys(folder: Path) -> bool:
    """Whether everybody may write into it."""
    try:
        return bool(folder.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return False


def _may_write(folder: Path) -> bool:
    """Whether this process may make something in it; it may have to be made, too."""
    while not folder.exists() and folder.parent != folder:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


def moved_tag(commit: str) -> str:
    """The tag of a snapshot whose folder was renamed; no path has it."""
    return f"odd/moved/{commit[:16]}"


def tag_of(name: str) -> str:
    """The tag of a snapshot with this name; that of another name is another one."""
    parts = name.split("/")
    is_plain = len(name) <= _MOST_CHARS and all(map(_PLAIN_PART.fullmatch, parts))
    if is_plain and parts[0] not in _TAKEN and not name.startswith(RUN) and not _WHOLE_ID.fullmatch(name):
        return name
    shown = re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[-40:].strip("-")
    return f"odd/{shown or 'snapshot'}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"
