"""verify and signers: who signed commits and tags, and which branches take signed commits only; options of other verbs.

Keys, agents and passphrases are ssh-keygen's affair: see cas_ckpt/signing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cas_ckpt.cli.command import Settings, flag, verb, verb_group
from cas_ckpt.cli.output import escaped, plain, subject, table, utc
from cas_ckpt.errors import ConflictError, InvalidInputError, SignatureError
from cas_ckpt.objects.digest import SHORT_HEX

if TYPE_CHECKING:
    from cas_ckpt.core.signatures import SignedBranches
    from cas_ckpt.ops.verify import Verified, VerifyReport
    from cas_ckpt.signing import SignatureInfo, Trust

_F = TypeVar("_F", bound=Callable[..., Any])

UNSIGNED = SignatureError.exit_code


def sign_option() -> Callable[[_F], _F]:
    """The key that signs, as `sign`."""
    return click.option("--sign", metavar="KEYFILE", help="Sign with this key of SSH, e.g. ~/.ssh/id_ed25519.")


def trust_option(
    help: str = "Only if somebody here signed it: allowed signers or a public key; may be repeated.",  # noqa: A002
) -> Callable[[_F], _F]:
    """Whose signatures count, as `trust`."""
    return click.option("--trust", multiple=True, metavar="FILE|KEY", help=f"{help} Default: $CAS_CKPT_TRUST.")


def given_trust(settings: Settings, given: tuple[str, ...], revoked: str | None = None) -> Trust | None:
    """The trusted signers from options and settings; None if there are none.

    Raises:
        InvalidInputError: something that is not understood. StorageError: a file cannot be read.
    """
    from cas_ckpt.signing import Trust, as_trust

    named = given or ((settings.trust,) if settings.trust else ())
    if not named:
        if revoked is not None:
            raise InvalidInputError("--revoked takes keys away from those that --trust names: give that too")
        return None
    found = Trust(tuple(line for each in named for line in as_trust(each).signers))
    return found if revoked is None else found.without(revoked)


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
            _write(repo.signed_bytes(revision), write)
    settings.page(plain(report) | {"ok": report.ok}, _lines(report))
    return 0 if report.ok else UNSIGNED


def _lines(report: VerifyReport) -> Iterator[str]:
    if report.tag is not None:
        yield _line(report.tag)
    for each in report.commits:
        yield _line(each)


def _line(each: Verified) -> str:
    name = f"tag {escaped(each.name)}" if each.what == "tag" else f"commit {each.name[:SHORT_HEX]}"
    title = subject(each.message)
    return f"{name}: {verdict_text(each.signature)}; {utc(each.time_s)} UTC" + (f"  {title}" if title else "")


def verdict_text(found: SignatureInfo) -> str:
    """A verdict in words."""
    whose = ", ".join(map(escaped, found.signers))
    key = f"{escaped(found.key_type)} {found.fingerprint}" if found.fingerprint else ""
    if found.is_good:
        return f"good signature of {whose} ({key})"
    words = f"{found.verdict.value}: {escaped(found.reason)}"
    return f"{words} ({', '.join(filter(None, (whose, key)))})" if key else words


def _write(signed: Any, name: str) -> None:
    for ending, data in ((".bytes", signed.message), (".sig", signed.signature.encode())):
        path = Path(name + ending)
        if path.exists():
            raise ConflictError(f"{path} is there already: choose another name")
        path.write_bytes(data)


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
