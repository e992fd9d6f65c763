"""branch, tag, pin, unpin, resolve; verify, signers: names of commits, and who signed what they name.

Keys, agents and passphrases are ssh-keygen's affair: see cas_ckpt/signing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cas_ckpt.cli.command import UNSIGNED, Settings, flag, given_trust, sign_option, trust_option, verb, verb_group
from cas_ckpt.cli.output import echo_json, escaped, plain, subject, table, utc, verdict_text
from cas_ckpt.core.refs import RefKind
from cas_ckpt.errors import ConflictError, NotFoundError
from cas_ckpt.objects.digest import SHORT_HEX
from cas_ckpt.ops.history.quick_log import quick_refs, quick_resolve

if TYPE_CHECKING:
    from cas_ckpt.core.signatures import SignedBranches
    from cas_ckpt.ops.refs import Verified
    from cas_ckpt.ops.sync.remotes import Tracked

_DELETE = flag("-d", "--delete", help="Delete the names that follow.")
_UNDELETE = flag("--undelete", help="Bring deleted names back, as they were.")
_DRY = flag("-n", "--dry-run", help="With --delete: only say what would be deleted.")
_FORCE = flag("-f", "--force", help="Move the name if it exists.")
_WORDS = click.argument("words", nargs=-1, metavar="[NAME [REVISION]]")


def standing(tracked: Tracked) -> str:
    """How a branch stands to that of a remote, when it was last asked."""
    name = escaped(tracked.remote_branch)
    ahead, behind = (f"{count} commit{'s' if count > 1 else ''}" for count in (tracked.ahead, tracked.behind))
    if tracked.ahead and tracked.behind:
        return f"diverged from {name}: {ahead} here, {behind} there"
    if tracked.ahead:
        return f"ahead of {name} by {ahead}"
    return f"behind {name} by {behind}" if tracked.behind else f"up to date with {name}"


@verb(
    "branch",
    examples=[
        "cas-ckpt branch",
        "cas-ckpt branch -a -v",
        "cas-ckpt branch ft-math base",
        "cas-ckpt branch -d ft-math",
        "cas-ckpt branch -D ft-failed",
        "cas-ckpt branch --undelete ft-math",
        "cas-ckpt branch -m ft-math ft-maths",
        "cas-ckpt branch --force main main~3",
        "cas-ckpt branch --default ft-math",
    ],
    also=[14, 15],
)
@_WORDS
@flag("-a", "--all", "everywhere", help="List those of remotes too, as they were when last asked.")
@flag("-r", "--remotes", help="List those of remotes.")
@flag("-v", "--verbose", help="List them with what their commits say, and how they stand to those of the remote.")
@_DELETE
@flag("-D", "give_up", help="As --delete --force.")
@_DRY
@_UNDELETE
@flag("-m", "--move", help="Rename: OLD NEW.")
@click.option("--default", "default", metavar="NAME", help="Let NAME be the default branch.")
@_FORCE
def branch(
    settings: Settings, words: tuple[str, ...], everywhere: bool, remotes: bool, verbose: bool, delete: bool,
    give_up: bool, dry_run: bool, undelete: bool, move: bool, default: str | None, force: bool,
) -> None:  # fmt: skip
    """List the branches; make the branch NAME at REVISION (default: HEAD); delete or rename branches.

    Deleting takes the name away and says which commit it named; commits stay until they are
    collected, and until then --undelete brings the branch back. A branch with commits that no other branch, tag, pin or
    branch of a remote leads to, or that are not at a tier yet, is deleted only with -D: they are not pushed any more
    then. With --force an existing branch is set to REVISION, an older commit too (git's reset); cas-ckpt reflog shows
    where it was. The default branch cannot be deleted or renamed; it is marked with an asterisk.
    """
    listed = everywhere or remotes or verbose
    delete, force = delete or give_up, force or give_up
    _only_one(delete=delete, undelete=undelete, move=move, default=default is not None, list=listed)
    if default is not None and words:
        raise click.UsageError("--default takes one name, and nothing else")
    if words and listed:
        raise click.UsageError("-a, -r and -v list branches: they take no NAME")
    if not (words or listed or delete or undelete or move or default) and _listed_quickly(settings, RefKind.BRANCH):
        return
    with settings.open() as repo:
        if default is not None:
            digest = repo.set_default_branch(default)
            line = f"The default branch is {escaped(default)} ({digest[:SHORT_HEX]}) now"
            settings.say({"default_branch": default, "commit_id": digest}, line)
        elif delete or undelete or move:
            verbs = (partial(repo.delete_branch, force=force), repo.undelete_branch, repo.rename_branch)
            _change(settings, "branch", words, verbs, delete, undelete, repo.branches() if dry_run else None)
        elif words:
            name, revision = _name_and_revision(words)
            _made(settings, "branch", name, repo.branch(name, start=revision, force=force))
        else:
            names = {} if remotes and not everywhere else repo.branches()
            names |= repo.remote_branches() if everywhere or remotes else {}
            notes = None
            if verbose:  # how each stands to that of the remote, and what its commit says
                tracked = repo.tracked_branches()
                said = {name: f"[{standing(tracked[name])}] " if name in tracked else "" for name in names}
                notes = {name: said[name] + repo.log(digest, limit=1)[0].message for name, digest in names.items()}
            _list(settings, names, marked=repo.default_branch, notes=notes)


@verb(
    "tag",
    examples=[
        "cas-ckpt tag",
        "cas-ckpt tag v1 main~2",
        "cas-ckpt tag -a v2 -m 'as released'",
        "cas-ckpt tag v2 -m 'as released' --sign ~/.ssh/id_ed25519",
        "cas-ckpt tag --force best",
        "cas-ckpt tag -d v1",
        "cas-ckpt tag --undelete v1",
        "cas-ckpt tag --move v1 v1.0",
    ],
    also=[14, 15],
)
@_WORDS
@flag("-a", "--annotate", help="Make an annotated tag; needs -m.")
@click.option("-m", "--message", default="", help="The message of an annotated tag.")
@sign_option()
@_DELETE
@_DRY
@_UNDELETE
@flag("--move", help="Rename: OLD NEW.")
@_FORCE
def tag(
    settings: Settings, words: tuple[str, ...], annotate: bool, message: str, sign: str | None, delete: bool,
    dry_run: bool, undelete: bool, move: bool, force: bool,
) -> None:  # fmt: skip
    """List the tags; let the tag NAME name REVISION (default: HEAD); delete or rename tags.

    A tag with a message (-a -m) is an annotated one; the list and cas-ckpt show print the message. A signed one
    (--sign) says who vouches for the commit: cas-ckpt verify.
    """
    _only_one(delete=delete, undelete=undelete, move=move, message=bool(annotate or message or sign))
    if sign and not words:
        raise click.UsageError("which tag is to be signed?")
    if annotate and not message:
        raise click.UsageError("an annotated tag needs a message: -m TEXT")
    if not (words or delete or undelete or move) and _listed_quickly(settings, RefKind.TAG):
        return
    with settings.open() as repo:
        if delete or undelete or move:
            verbs = (repo.delete_tag, repo.undelete_tag, repo.rename_tag)
            _change(settings, "tag", words, verbs, delete, undelete, repo.tags() if dry_run else None)
        elif words:
            name, revision = _name_and_revision(words)
            _made(settings, "tag", name, repo.tag(name, revision, message=message, force=force, sign=sign))
        else:
            _list(settings, repo.tags(), marked=None, notes=repo.tag_messages())


@verb(
    "pin",
    examples=[
        "cas-ckpt pin",
        "cas-ckpt pin main~100",
        "cas-ckpt pin 3fa9c1 --name paper --reason 'table 2 of the paper'",
        "cas-ckpt pin --undelete paper",
    ],
    also=[14, 15],
)
@click.argument("revision", required=False)
@click.option("--name", help="Its name. Default: pin- and the first digits of the id.")
@click.option("--reason", default="", help="Why it is to stay.")
@flag("--undelete", help="Bring the deleted pin REVISION back, as it was.")
@_FORCE
def pin(settings: Settings, revision: str | None, name: str | None, reason: str, undelete: bool, force: bool) -> None:
    """List the pins; or pin REVISION: it stays, whatever is forgotten, until it is unpinned.

    As a revision, a pin is written refs/pins/NAME.
    """
    with settings.open() as repo:
        if undelete:
            if revision is None:
                raise click.UsageError("which pin is to be brought back?")
            _made(settings, "pin", revision, repo.undelete_pin(revision))
            return
        if revision is not None:
            made = repo.pin(revision, name=name, reason=reason, force=force)
            settings.say(made, f"pin {escaped(made.name)} is {made.commit[:SHORT_HEX]}")
            return
        if name or reason or force:
            raise click.UsageError("which REVISION is to be pinned?")
        pins = repo.pins()
    settings.show(pins, table([(escaped(each.name), each.commit[:SHORT_HEX], subject(each.reason)) for each in pins]))


@verb("unpin", examples=["cas-ckpt unpin paper"], also=[14, 15])
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@flag("-n", "--dry-run", help="Only say what would be taken away.")
def unpin(settings: Settings, names: tuple[str, ...], dry_run: bool) -> None:
    """Take pins away; the commits that they kept can be forgotten from now on."""
    with settings.open() as repo:
        if dry_run:
            _would_delete(settings, "pin", names, {pin.name: pin.commit for pin in repo.pins()})
            return
        _each(settings, "pin", names, repo.unpin, undelete=False)


@verb("resolve", examples=["cas-ckpt resolve main~2", "cas-ckpt resolve 3fa9"], also=[15])
@click.argument("revision", default="HEAD")
def resolve(settings: Settings, revision: str) -> None:
    """Print the whole id of the commit that REVISION stands for."""
    quick = None if settings.index else quick_resolve(settings.place(), None if revision == "HEAD" else revision)
    if quick is not None:
        digest = quick.hex()
    else:
        with settings.open() as repo:
            digest = repo.resolve(revision)
    settings.show({"revision": revision, "commit_id": digest}, [digest])


def _only_one(**given: bool) -> None:
    if sum(given.values()) > 1:
        raise click.UsageError(f"choose one of {', '.join(f'--{name}' for name, wanted in given.items() if wanted)}")


def _name_and_revision(words: Sequence[str]) -> tuple[str, str]:
    if len(words) > 2:
        raise click.UsageError(f"wanted a name and a revision, found {len(words)} words")
    return words[0], words[1] if len(words) == 2 else "HEAD"


def _listed_quickly(settings: Settings, kind: RefKind) -> bool:
    """Print the branches or tags, if that can be done without opening the repository."""
    found = None if settings.index else quick_refs(settings.place())
    if found is None:
        return False
    refs = [ref for ref in found[1] if ref.kind is kind]
    marked = found[0] if kind is RefKind.BRANCH else None
    names = {ref.name: ref.target.hex() for ref in refs if ref.target is not None}
    _list(settings, names, marked=marked, notes={ref.name: ref.note for ref in refs})
    return True


def _list(
    settings: Settings, names: Mapping[str, str], *, marked: str | None, notes: Mapping[str, str] | None = None
) -> None:
    """Print names and commits; with an asterisk before `marked`, unless it is None."""
    width = max(map(len, names), default=0)
    marks = {name: "" if marked is None else "* " if name == marked else "  " for name in names}
    settings.show(
        names,
        (
            f"{marks[name]}{name.ljust(width)}  {digest[:SHORT_HEX]}  {subject((notes or {}).get(name, ''))}".rstrip()
            for name, digest in names.items()
        ),
    )


def _made(settings: Settings, what: str, name: str, digest: str) -> None:
    settings.say({what: name, "commit_id": digest}, f"{what} {escaped(name)} is {digest[:SHORT_HEX]}")


def _change(
    settings: Settings, what: str, words: Sequence[str],
    verbs: tuple[Callable[[str], str], Callable[[str], str], Callable[[str, str], str]],
    delete: bool, undelete: bool, existing: Mapping[str, str] | None,
) -> None:  # fmt: skip
    """Delete, bring back or rename branches or tags.

    Args:
        verbs: What deletes, brings back and renames one.
        existing: Only say what deleting would take away, of these.
    """
    if delete and existing is not None:
        _would_delete(settings, what, words, existing)
    elif delete or undelete:
        _each(settings, what, words, verbs[0] if delete else verbs[1], undelete=undelete)
    elif len(words) != 2:
        raise click.UsageError(f"wanted the old and the new name of a {what}")
    else:
        old, new = words
        digest = verbs[2](old, new)
        line = f"{what} {escaped(old)} is {escaped(new)} now ({digest[:SHORT_HEX]})"
        settings.say({what: new, "commit_id": digest, "was": old}, line)


def _would_delete(settings: Settings, what: str, names: Sequence[str], existing: Mapping[str, str]) -> None:
    """Say what deleting `names` would take away.

    Raises:
        NotFoundError: one of them is not there.
    """
    for name in names:
        if name not in existing:
            raise NotFoundError(f"there is no {what} {name!r}")
    lines = (f"Would delete {what} {escaped(name)} ({existing[name][:SHORT_HEX]})" for name in names)
    settings.show({name: existing[name] for name in names}, lines)


def _each(settings: Settings, what: str, names: Sequence[str], change: Callable[[str], str], *, undelete: bool) -> None:
    """Delete, or bring back, every one of `names`."""
    if not names:
        raise click.UsageError(f"which {what} is to be {'brought back' if undelete else 'deleted'}?")
    changed = {}
    for name in names:
        changed[name] = change(name)
        if not settings.json and not settings.quiet:
            text = "{} {} is {} again" if undelete else "Deleted {} {} (was {})"
            click.echo(text.format(what, escaped(name), changed[name][:SHORT_HEX]))
    if settings.json:
        echo_json(changed)


# --- who signed commits and tags ----------------------------------------------------------------


@verb(
    "verify",
    examples=[
        "cas-ckpt verify main --trust allowed_signers",
        "cas-ckpt verify v1 --trust ann.pub",
        "cas-ckpt verify main --history --trust allowed_signers --revoked old_keys",
        "cas-ckpt verify main --write main --trust allowed_signers",
    ],
    also=[14, 15, UNSIGNED],
)
@click.argument("revision", default="HEAD")
@trust_option("Whose signatures count: a file of allowed signers, or a public key; may be repeated.")
@click.option("--revoked", metavar="FILE", help="Keys that count no more: public keys, one a line, or a KRL.")
@flag("--history", help="Every commit that it leads to has to be signed as well.")
@click.option("--write", metavar="NAME", help="Write NAME.bytes and NAME.sig, for ssh-keygen -Y verify.")
def verify(
    settings: Settings, revision: str, trust: tuple[str, ...], revoked: str | None, history: bool, write: str | None
) -> int:
    """Say who signed a commit, or the tag that REVISION is, and end with 0 if somebody trusted did.

    Signatures are those of SSH keys, as git makes them, in the namespace cas_ckpt. Times of validity are
    compared with the time that the commit or tag itself says. The state is not read: a signed commit holds the
    ids of everything that a checkout verifies.
    """
    trusted = given_trust(settings, trust, revoked)
    if trusted is None:
        raise click.UsageError("whose signatures count? Give --trust FILE, of allowed signers or a public key")
    with settings.open() as repo:
        report = repo.verify(revision, trust=trusted, history=history)
        if write is not None:
            signed = repo.signed_bytes(revision)
            for ending, data in ((".bytes", signed.message), (".sig", signed.signature.encode())):
                path = Path(write + ending)
                if path.exists():
                    raise ConflictError(f"{path} is there already: choose another name")
                path.write_bytes(data)
    judged = [*([] if report.tag is None else [report.tag]), *report.commits]
    settings.page(plain(report) | {"ok": report.ok}, map(_line, judged))
    return 0 if report.ok else UNSIGNED


def _line(each: Verified) -> str:
    name = f"tag {escaped(each.name)}" if each.what == "tag" else f"commit {each.name[:SHORT_HEX]}"
    title = subject(each.message)
    return f"{name}: {verdict_text(each.signature)}; {utc(each.time_s)} UTC" + (f"  {title}" if title else "")


# --- branches that take signed commits only ---------------------------------------------------


@verb_group("signers")
def signers() -> None:
    """Branches that take signed commits only: whose signatures they take.

    It keeps those who use cas_ckpt from mistakes. Who can write to the storage otherwise can change this too:
    readers give --trust.
    """


@signers.verb("set", examples=["cas-ckpt signers set main --trust allowed_signers"], also=[14])
@click.argument("pattern")
@trust_option("Whose signatures the branches take; may be repeated.")
def signers_set(settings: Settings, pattern: str, trust: tuple[str, ...]) -> None:
    """Let the branches that match PATTERN take commits only that somebody in --trust signed."""
    trusted = given_trust(settings, trust)
    if trusted is None:
        raise click.UsageError("whose signatures do they take? Give --trust FILE")
    with settings.open() as repo:
        found = repo.set_signers(pattern, trusted)
    settings.show(found, _rows(found))


@signers.verb("show", examples=["cas-ckpt signers show"])
def signers_show(settings: Settings) -> None:
    """Print the patterns of branches, and the keys whose signatures they take."""
    with settings.open() as repo:
        found = repo.signers()
    settings.show(found, _rows(found))


@signers.verb("clear", examples=["cas-ckpt signers clear main", "cas-ckpt signers clear"], also=[14, 15])
@click.argument("pattern", required=False)
def signers_clear(settings: Settings, pattern: str | None) -> None:
    """Let the branches of PATTERN, or all, take any commit again."""
    with settings.open() as repo:
        found = repo.clear_signers(pattern)
    settings.show(found, _rows(found))


def _rows(found: SignedBranches) -> list[str]:
    if not found.branches:
        return ["every branch takes any commit"]
    return table([(escaped(each.pattern), escaped(line)) for each in found.branches for line in each.signers])
