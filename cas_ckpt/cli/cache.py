"""cache show, cache clear: what this host keeps of repositories on stores that are not local."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from cas_ckpt.cli.command import SIZE, Settings, verb, verb_group
from cas_ckpt.cli.output import escaped, table, utc
from cas_ckpt.core.host_cache import HostCache
from cas_ckpt.errors import NotFoundError
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.core.host_cache import CachedRepository


@verb_group("cache")
def cache() -> None:
    """What this host keeps of remote repositories, so that the next look costs few requests.

    It is in ~/.cache/cas_ckpt, or where $CAS_CKPT_CACHE says; nowhere if that is empty. Losing it loses time alone.
    """


@verb("show", examples=["cas-ckpt cache show", "cas-ckpt cache show --max-size 20GB"])
@click.option("--max-size", type=SIZE, help="Keep at most so many bytes from now on. At first 10 GB.")
@click.pass_obj
def show(settings: Settings, max_size: int | None) -> None:
    """Show where it is, how large, and what is in it, the last used first.

    Beyond the limit, what was not used for longest is removed. Indexes count, and stay.
    """
    host = _host()
    if max_size is not None:
        host.set_limit(max_size)
    found = host.repositories()
    plain = {
        "folder": str(host.folder), "limit_bytes": host.limit_bytes,
        "repositories": [
            {"id": each.store_id, "url": each.url, "num_bytes": each.num_bytes, "used_s": each.used_s}
            for each in found
        ],
    }  # fmt: skip
    settings.show(plain, _lines(host, found))


def _lines(host: HostCache, found: list[CachedRepository]) -> Iterator[str]:
    total = sum(each.num_bytes for each in found)
    yield f"{escaped(str(host.folder))}: {human_bytes(total)} of at most {human_bytes(host.limit_bytes)}"
    rows = [
        (each.store_id[:12], human_bytes(each.num_bytes), utc(each.used_s), escaped(each.url or "")) for each in found
    ]
    yield from table(rows, right=frozenset({1}))


@verb("clear", examples=["cas-ckpt cache clear", "cas-ckpt cache clear s3://bucket/llm"], also=[15])
@click.argument("repo", required=False, metavar="[URL|ID]")
@click.pass_obj
def clear(settings: Settings, repo: str | None) -> None:
    """Remove what is kept of one repository, or of all. An index that a process has open stays."""
    host = _host()
    freed, busy = host.clear(None if repo is None else _named(host, repo))
    in_use = f"; {len(busy)} indexes are in use and stay" if busy else ""
    settings.say({"freed_bytes": freed, "in_use": busy}, f"{human_bytes(freed)} removed{in_use}")


def _named(host: HostCache, repo: str) -> str:
    """The folder of the one repository that is meant."""
    found = [each.name for each in host.repositories() if repo == each.url or each.name.startswith(repo)]
    if not found:
        raise NotFoundError(f"nothing is kept of {repo!r}: cas-ckpt cache show lists URLs and ids")
    if len(found) > 1:
        raise NotFoundError(
            f"{repo!r} is the URL, or the beginning of the id, of {len(found)} repositories: write more"
        )
    return found[0]


def _host() -> HostCache:
    host = HostCache.open()
    if host is None:
        raise NotFoundError("there is no cache on this host: $CAS_CKPT_CACHE is empty, or the folder cannot be written")
    return host


cache.add_command(show)
cache.add_command(clear)
