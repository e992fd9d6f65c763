"""forget and policy: which commits keep their data; gc and repack: giving space back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from cas_ckpt.cli.command import AGE, COUNT, SHARE, SIZE, Settings, flag, shard_option, verb, verb_group
from cas_ckpt.cli.output import cut, echo_json, escaped, subject, summary, table
from cas_ckpt.errors import PermissionDeniedError
from cas_ckpt.objects.digest import SHORT_HEX
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.ops.gc.plan import GcReport
    from cas_ckpt.ops.retention.forget import DecidedCommit, ForgetReport
    from cas_ckpt.ops.retention.policy import Policy, Retention


PARTLY = 3
_SPANS = {"hourly": "hours", "daily": "days", "weekly": "weeks", "monthly": "months", "yearly": "years"}
MOST_ROWS = 10
"""Commits that are kept, and that are forgotten, in the list without --long."""

_HEADINGS = ("commit", "made (UTC)", "step", "reasons", "message")


def _rules(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that make a policy, restic's and our own; they arrive as keep_*."""
    options = [
        click.option("--keep-last", default="0", type=COUNT, help="Keep the N youngest commits."),
        *(click.option(f"--keep-{name}", default="0", type=COUNT,
                       help=f"Keep the youngest commit of each of the last N {periods} that have one.")
          for name, periods in _SPANS.items()),
        click.option("--keep-within", default="", metavar="DURATION",
                     help="Keep all commits of this time before the youngest, e.g. 2y5mo7d3h."),
        *(click.option(f"--keep-within-{name}", default="", metavar="DURATION",
                       help=f"Keep {name} commits of this time.")
          for name in _SPANS),
        click.option("--keep-tag", "keep_tags", multiple=True, metavar="PATTERN",
                     help="Keep tagged commits (they are kept anyway: alone, this forgets all others)."),
        click.option("--keep-every-steps", type=click.IntRange(min=0), default=0, metavar="N",
                     help="Keep the first commit at or after each multiple of N steps."),
        click.option("--keep-best", multiple=True, metavar="METRIC:N[:min|max]",
                     help="Keep the N commits with the smallest (or largest) metric; may be repeated."),
        click.option("--keep-last-restored", default="0", type=COUNT,
                     help="Keep the N commits that were last restored whole (cas-ckpt restores)."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def _policy_of(rules: dict[str, Any]) -> Policy:
    from cas_ckpt.ops.retention.policy import Policy

    return Policy(**rules)


@verb(
    "forget",
    examples=[
        "cas-ckpt forget -n --keep-last 3 --keep-daily 7 --keep-weekly 5",
        "cas-ckpt forget --keep-every-steps 1000 --keep-best loss:3 --branch 'ft/*' --gc",
        "cas-ckpt forget --policy --gc",
        "cas-ckpt forget 3fa9c1 main~5",
    ],
    also=[3, 14, 15],
)
@click.argument("revisions", nargs=-1, metavar="[REVISION]...")
@_rules
@flag("--policy", "stored", help="Apply the rules that the repository carries.")
@click.option("--branch", "branches", multiple=True, metavar="PATTERN", help="Only these branches; may be repeated.")
@flag("--gc", help="Then delete what nothing needs any more, as cas-ckpt gc does.")
@flag("--verify-tier", help="Read and verify all that tiers hold before the last copy here is given up.")
@flag("-n", "--dry-run", help="Change nothing, say what would be forgotten and why.")
@flag("-l", "--long", help="List every commit, not only the youngest ten of each kind.")
def forget(
    settings: Settings, /, revisions: tuple[str, ...], stored: bool, branches: tuple[str, ...], long: bool,
    **options: Any,
) -> int:  # fmt: skip
    """Forget commits: their data may be deleted, they stay in the log.

    By rules: on every branch, what no rule keeps is forgotten. Heads of branches, tags and pins are
    kept always. Days begin at 00:00 UTC, weeks on Mondays. Or by REVISION: these commits.

    Space is given back by the next garbage collection (--gc, cas-ckpt gc). What a tier is to have is forgotten only if
    the tier, which is asked, still has it: its refs, and its packs by their sizes; --verify-tier reads them.
    """
    policy = _policy_of({name: options.pop(name) for name in [*options] if name.startswith("keep_")})
    if sum((bool(revisions), stored, not policy.is_empty)) != 1:
        raise click.UsageError("give rules (--keep-...), or --policy, or revisions: one of the three")
    if revisions and branches:
        raise click.UsageError("--branch is for rules: a revision is forgotten wherever it is")
    with settings.open(read_only=options["dry_run"]) as repo:
        if revisions:
            report = repo.forget(revisions=revisions, **options)
        elif stored:
            report = repo.apply_policy(branches=branches, **options)
        else:
            report = repo.forget(policy, branches=branches, **options)
    if settings.json:
        decisions = [
            summary(one.commit, time_s=one.commit.time_s, keep=one.keep, reasons=one.reasons)
            for one in report.decisions
        ]
        echo_json({
            "dry_run": report.dry_run, "decisions": decisions, "forgotten_commit_ids": report.forgotten,
            "freed_bytes": report.freed_bytes, "gc": report.collected,
        })  # fmt: skip
        return 0 if report.collected is None else _exit_code(report.collected)
    if not settings.quiet:
        most = len(report.decisions) if long else MOST_ROWS
        settings.page(None, _lines(report, most=most, width=settings.width))
    return 0 if report.collected is None else _show_collection(settings, report.collected)


def _lines(report: ForgetReport, *, most: int, width: int | None) -> Iterator[str]:
    would, may = ("would be ", "could") if report.dry_run else ("", "can")
    for keep, title in ((True, "kept"), (False, f"{would}forgotten")):
        chosen = [one for one in report.decisions if one.keep is keep]
        if chosen:
            rows = [_HEADINGS, *map(_row, chosen[:most])]
            yield f"{title}:"
            yield from (cut(f"  {line}", width) for line in table(rows, right=frozenset({2})))
            if len(chosen) > most:
                yield f"  and {len(chosen) - most} more (--long lists all)"
    freed = report.freed_bytes
    back = "" if freed is None else f"; garbage collection {may} give back {human_bytes(freed)}"
    kept = sum(one.keep for one in report.decisions)
    yield f"{kept} commits kept, {len(report.forgotten)} {would}forgotten{back}"


def _row(one: DecidedCommit) -> tuple[str, ...]:
    commit = one.commit
    step = "" if commit.step is None else str(commit.step)
    why = ", ".join(map(escaped, one.reasons))
    return commit.short_id, f"{commit.time:%Y-%m-%d %H:%M}", step, why, subject(commit.message)


@verb_group("policy")
def policy() -> None:
    """The rules of retention that the repository carries; cas-ckpt forget --policy applies them."""


@policy.verb(
    "set",
    examples=[
        "cas-ckpt policy set --keep-daily 7 --keep-weekly 5 --keep-monthly 12",
        "cas-ckpt policy set --branch 'ft/*' --keep-last 2 --keep-best loss:1",
    ],
    also=[14],
)
@_rules
@click.option("--branch", metavar="PATTERN", help="The rules are for the branches that match, instead of the others.")
def policy_set(settings: Settings, /, branch: str | None, **rules: Any) -> None:
    """Let these be the rules; those that were there (for this pattern) are replaced.

    The first pattern that a branch matches, in the order in which they were first set, has its rules.
    """
    with settings.open() as repo:
        _show_policy(settings, repo.set_policy(_policy_of(rules), branch=branch))


@policy.verb("show", examples=["cas-ckpt policy show", "cas-ckpt policy show --json"])
def policy_show(settings: Settings) -> None:
    """Show the rules."""
    with settings.open() as repo:
        _show_policy(settings, repo.policy())


@policy.verb("clear", examples=["cas-ckpt policy clear", "cas-ckpt policy clear --branch 'ft/*'"], also=[14, 15])
@click.option("--branch", metavar="PATTERN", help="Only the rules for this pattern.")
def policy_clear(settings: Settings, branch: str | None) -> None:
    """Take the rules away; nothing is forgotten by rules then."""
    with settings.open() as repo:
        _show_policy(settings, repo.clear_policy(branch=branch))


def _show_policy(settings: Settings, held: Retention) -> None:
    branches = [{"pattern": pattern, "rules": rules.rules()} for pattern, rules in held.branches]
    rows = [(escaped(pattern), escaped(str(rules))) for pattern, rules in held.branches]
    others = "all branches" if not rows else "other branches"
    rows.append((others, escaped(str(held.default)) if not held.default.is_empty else "keep everything"))
    text = "no policy" if held.is_empty else "\n".join(table(rows))
    settings.say({"default": held.default.rules(), "branches": branches}, text)


# --- gc and repack: giving space back -------------------------------------------------------


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    dry = flag("-n", "--dry-run", help="Change nothing, say what would be done.")
    limit = click.option("--max-repack-bytes", type=SIZE, help="Copy at most so much, e.g. 20GB.")
    return dry(limit(shard_option("Collect the packs of job I of N alone, from 1 on.")(command)))


@verb("gc", examples=["cas-ckpt gc -n", "cas-ckpt gc", "cas-ckpt gc --expire-reflog now --min-age 0"], also=[3, 14])
@click.option("--min-age", "min_age_s", default="1h", type=AGE, show_default=True,
              help="Spare packs younger than this that no commit uses yet.")  # fmt: skip
@click.option("--expire-reflog", "reflog_expire_s", default="30d", type=AGE, show_default=True,
              help="How long deleted and moved branches can be brought back.")  # fmt: skip
@click.option("--max-unused", default="5%", type=SHARE, show_default=True,
              help="Waste that may stay inside packs that are needed in part.")  # fmt: skip
@click.option("--merge/--no-merge", default=None,
              help="Merge small packs where there are 64 of a kind [default: on a local disk alone].")  # fmt: skip
@_common
def gc(settings: Settings, /, **options: Any) -> int:
    """Delete what no branch, tag or pin needs.

    Packs that hold waste beside what is needed are rewritten. Where there are 64 small packs of a kind, as commits
    leave them, those are merged into few: nothing of them is lost, and later commands open fewer files.

    Safe beside any number of commits, checkouts and other collections. What a collection that
    died left is finished first. The exit code is 3 if a pack had to be left because it is damaged, or
    because there was no space to copy what is needed of it; 12 if packs may not be deleted, as in a bucket that only
    takes new objects.
    """
    with settings.open() as repo:
        report = repo.gc(**options, progress=settings.show_progress())
    return _show_collection(settings, report)


@verb(
    "repack",
    examples=["cas-ckpt repack -n", "cas-ckpt repack --max-repack-bytes 50GB", "cas-ckpt repack --shard 3/16"],
    also=[3, 14],
)
@_common
def repack(settings: Settings, /, **options: Any) -> int:
    """Collect, and rewrite packs that are small, hold waste, or hold chunks in parts."""
    with settings.open() as repo:
        report = repo.repack(**options, progress=settings.show_progress())
    return _show_collection(settings, report)


def _show_collection(settings: Settings, report: GcReport) -> int:
    """Print what a collection did; its exit code."""
    settings.say(report, "\n".join(table(_rows(report))))
    for _, problem in report.damaged:
        click.echo(f"cas-ckpt: left as it is: {escaped(problem)}", err=True)
    if report.not_at_tiers:
        commit, why = report.not_at_tiers[0]
        what = f"{len(report.not_at_tiers)} forgotten commits keep their data, such as {commit[:SHORT_HEX]}: {why}"
        click.echo(f"cas-ckpt: {escaped(what)}", err=True)
    if report.full:
        click.echo("cas-ckpt: no space for copies: only packs without anything needed were deleted", err=True)
    if report.denied:
        click.echo(f"cas-ckpt: packs could not be deleted: {escaped(report.denied)}", err=True)
    return _exit_code(report)


def _exit_code(report: GcReport) -> int:
    if report.denied:
        return PermissionDeniedError.exit_code
    return PARTLY if report.damaged or report.full else 0


def _rows(report: GcReport) -> Iterator[tuple[str, str]]:
    would = "would be " if report.dry_run else ""
    if report.took_over:
        yield "took over", f"a collection that was left while {report.took_over}"
    yield "not needed", f"{human_bytes(report.dead_bytes)} in {report.dead_objects} objects"
    num_kept = report.merged_packs + report.rewritten_packs
    kept_bytes = report.merged_bytes + report.rewritten_bytes
    num_dead, dead_bytes = report.deleted_packs - num_kept, report.deleted_bytes - kept_bytes
    yield f"{would}deleted", f"{human_bytes(dead_bytes)} in {num_dead} packs"
    if report.rewritten_packs:
        what = f"{human_bytes(report.rewritten_bytes)} in {report.rewritten_packs} packs that hold waste"
        yield f"{would}rewritten", f"{what}: 0 B lost of what is needed"
    if report.merged_packs:
        what = f"{human_bytes(report.merged_bytes)} in {report.merged_packs} small packs into few"
        yield f"{would}merged", f"{what}: 0 B lost, and fewer files to open (--no-merge leaves them)"
    if report.unmerged_packs:
        what = f"{human_bytes(report.unmerged_bytes)} in {report.unmerged_packs} small packs"
        # Two and a half requests for each small pack: counted in docs/decisions/016-merging-in-a-bucket.md
        costs = f"--merge moves them once, in about {report.unmerged_packs * 5 // 2} requests"
        yield "not merged", f"{what}: {costs}, and spares each new host {report.unmerged_packs}"
    if report.denied:
        yield "not allowed", f"{human_bytes(report.denied_bytes)} in {report.denied_packs} packs are still there"
    if report.copied_packs:
        yield f"{would}copied", f"{human_bytes(report.copied_bytes)} out of {report.copied_packs} packs"
    if report.rescued_packs:
        yield "kept", f"{report.rescued_packs} packs that a commit needed meanwhile"
    if report.young_packs:
        yield "spared", f"{report.young_packs} packs that a commit under way may need"
    if report.wasted_bytes:
        yield "waste left", human_bytes(report.wasted_bytes)
    if report.temporaries:
        yield f"{would}removed", f"{human_bytes(report.temporary_bytes)} in {report.temporaries} temporary files"
