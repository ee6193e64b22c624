"""``ml4 conformance``: judges a backend, and shows what was found.

Exit codes of ``run``: 0 conformant, with waivers too; 1 not conformant; 2 a wrong command line;
3 the backend may not be loaded; 5 incomplete, or nothing was judged; 130 interrupted, with what was
found until then written all the same.
"""

from __future__ import annotations

from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from ml4core.cli import output
from ml4core.cli.exits import INTERRUPTED, USAGE, UsageError
from ml4core_conformance.check import PROFILES
from ml4core_conformance.listing import (
    chosen_checks,
    explained,
    facts,
    known_checks,
    none_matches,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ml4core_conformance.results import Result
    from ml4core_conformance.waivers import Waiver

OK, NOT_CONFORMANT, INCOMPLETE = 0, 1, 5
WAIVERS = Path("conformance.toml")

app = typer.Typer(
    help="Judge a backend: every op, layout, stage and promise against one oracle.",
    no_args_is_help=True,
    add_completion=False,
)

Backend = Annotated[str, typer.Option("--backend", help="Word of the backend to judge.")]
Profiles = Annotated[
    list[str] | None,
    typer.Option("--profile", help=f"One of {', '.join(PROFILES)}; may be repeated."),
]
Expression = Annotated[
    str, typer.Option("-k", help="Checks whose id holds these words; and, or, not, ( and ).")
]
Plugin = Annotated[
    str, typer.Option("--backend", help="With the checks that this backend's plugin adds.")
]
Files = Annotated[list[Path], typer.Argument(help="Results of `run --json`.", exists=True)]


@app.command()
def run(
    backend: Backend,
    profile: Profiles = None,
    expression: Expression = "",
    jobs: Annotated[
        int | None,
        typer.Option(min=0, help="Worker processes; 0: all in this one, with nothing isolated."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Inputs are drawn for this many seeds.")] = 1,
    device: Annotated[
        str, typer.Option(help="Kind of the device: real, interpreted, fake or source.")
    ] = "real",
    api: Annotated[
        int | None, typer.Option(help="Judge as a backend of this API version.", min=1)
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the result here.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the page here.")] = None,
    waivers: Annotated[
        Path | None,
        typer.Option(help=f"Known faults; ./{WAIVERS} if there is one.", exists=True),
    ] = None,
) -> None:
    """Judge a backend.

    Exit code 0: conformant, with waivers too. 1: not conformant. 2: a wrong command line. 3: the
    backend may not be loaded. 5: incomplete, or nothing judged. 130: interrupted, or ended by
    SIGTERM; what was found is written all the same, and twice a minute while the suite runs.
    """
    from ml4core_conformance.progress import Progress
    from ml4core_conformance.report.text import summary
    from ml4core_conformance.results import Selection
    from ml4core_conformance.verify import examine, find, served_api

    _known_kind(device)
    if backend == "auto":
        raise UsageError("--backend auto: name the backend to judge; `ml4 backends` lists them")
    known = _waivers(waivers)
    with output.busy(f"probing {backend}"):
        found = find(backend, device_kind=device, seeds=tuple(range(seeds)))
    chosen = Selection(
        tuple(profile or ()), expression, api or served_api(found), found.target.seeds
    )
    total = len(chosen_checks(chosen, found.checks))
    if not total:
        raise UsageError(none_matches(chosen))
    with Progress(backend, total) as progress:
        keep = None if json is None else methodcaller("save", json)
        result = examine(found, chosen, jobs=jobs, waivers=known, observe=progress.take, keep=keep)
    _write(result, json, junit, html)
    output.write(summary(result))
    raise typer.Exit(exit_code(result))


@app.command("list")
def list_checks(
    profile: Profiles = None,
    expression: Expression = "",
    as_json: Annotated[bool, typer.Option("--json", help="A list of objects.")] = False,
    backend: Plugin = "",
) -> None:
    """List the checks."""
    from ml4core_conformance.results import Selection

    checks = chosen_checks(Selection(tuple(profile or ()), expression), known_checks(backend))
    if as_json:
        output.write_json([facts(check) for check in checks])
    else:
        output.write("".join(f"{check.profile:<8} {check.id}\n" for check in checks))
        output.note(f"{len(checks)} checks")


@app.command()
def explain(
    check: Annotated[str, typer.Argument(help="Id of a check, or of a family.", metavar="CHECK")],
    backend: Plugin = "",
) -> None:
    """Say what a check proves, and what it asks of a backend."""
    checks = known_checks(backend)
    named = [each for each in checks if check in (each.id, each.family)]
    if not named:
        near = [each.id for each in checks if check.lower() in each.id.lower()][:5]
        hint = f"; did you mean {', '.join(near)}?" if near else "; `list` shows all"
        raise UsageError(f"no check {check!r}{hint}")
    output.write("\n".join(map(explained, named)))


@app.command()
def report(
    files: Files,
    html: Annotated[Path | None, typer.Option(help="Write the page here.")] = None,
    junit: Annotated[Path | None, typer.Option(help="JUnit XML, of a single result.")] = None,
    stale_days: Annotated[
        float, typer.Option("--stale-days", min=0, help="Days after which a result is stale.")
    ] = 30,
) -> None:
    """Show results of many runs as one page, or as text."""
    from ml4core_conformance.report.junit import write_junit
    from ml4core_conformance.report.page import write_page
    from ml4core_conformance.report.text import summary

    results = [_load(file) for file in files]
    if junit and len(results) > 1:
        raise UsageError("--junit: works: a single result")
    if html:
        write_page(results, html, stale_days=stale_days)
    if junit:
        write_junit(results[0], junit)
    if not (html or junit):
        output.write("\n".join(map(summary, results)))


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(exists=True)],
    after: Annotated[Path, typer.Argument(exists=True)],
    noticed: Annotated[
        float, typer.Option(min=1, help="Ratio of errors, either way, from which it is told.")
    ] = 1.25,
) -> None:
    """Show what changed between two results, with the ratio of errors. Exit code 1: a check that
    was green no longer is.
    """
    from ml4core_conformance.report import diff as reports

    a, b = _load(before), _load(after)
    changes = reports.diff(a, b, noticed=noticed)
    output.write(reports.text(a, b, changes))
    if any(change.worse for change in changes):
        raise typer.Exit(NOT_CONFORMANT)


@app.command()
def matrix(
    files: Files,
    also: Annotated[
        list[str] | None,
        typer.Option(help="A backend to show as never run, if it wasn't on a real device."),
    ] = None,
    write: Annotated[Path | None, typer.Option(help="File to write; else stdout.")] = None,
) -> None:
    """Make the support matrix, and the table of what works together, as Markdown."""
    from ml4core_conformance.report.matrix import to_markdown

    page = to_markdown([_load(file) for file in files], also or ())
    if write is None:
        output.write(page)
    else:
        write.parent.mkdir(parents=True, exist_ok=True)
        write.write_text(page, "utf-8")


@app.command("selftest")
def self_test(
    backend: Annotated[
        str, typer.Option("--backend", help="An honest backend, to make mutants of.")
    ] = "cpu",
    full: Annotated[bool, typer.Option("--full", help="Every check on every mutant.")] = False,
    expression: Annotated[str, typer.Option("-k", help="Mutants whose name holds these.")] = "",
    jobs: Annotated[int | None, typer.Option(min=0, help="Worker processes.")] = None,
    device: Annotated[
        str, typer.Option(help="Kind of the device: real, interpreted, fake or source.")
    ] = "real",
    profile: Annotated[
        list[str] | None,
        typer.Option("--profile", help="Mutants that die in these profiles; may be repeated."),
    ] = None,
) -> None:
    """Judge the suite: the honest backend passes, each mutant dies where it should, and each check
    that gates kills at least one. Exit code 0 if so. With -k or --profile, checks that kill none
    are not held against it.
    """
    from ml4core_conformance.expression import ExpressionError, parse
    from ml4core_conformance.mutants import mutants
    from ml4core_conformance.selftest import selftest, text, within
    from ml4core_conformance.verify import find

    _known_kind(device)
    try:
        meant = parse(expression)
        all_mutants = within(mutants(), known_checks(""), profile) if profile else mutants()
    except (ExpressionError, ValueError) as error:
        raise UsageError(str(error)) from None
    chosen = [mutant for mutant in all_mutants if meant(mutant.name)]
    if not chosen:
        raise UsageError(
            f"-k {expression!r}: no mutant is called so{' in these profiles' if profile else ''}; "
            "works: part of a name, as topk or fault"
        )
    found = find(backend, device_kind=device)
    partial = bool(expression or profile)
    outcome = selftest(found, chosen, full=full, jobs=jobs, partial=partial, tell=output.note)
    output.write(text(outcome))
    if not outcome.complete:
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(OK if outcome.passed else NOT_CONFORMANT)


def _known_kind(device: str) -> None:
    from ml4core.api.backend import DeviceKind

    if device not in (kinds := get_args(DeviceKind)):
        raise UsageError(f"--device {device}: works: {', '.join(kinds)}")


def exit_code(result: Result) -> int:
    if not result.complete:
        return INTERRUPTED
    codes = {
        "conformant": OK,
        "conformant with waivers": OK,
        "not conformant": NOT_CONFORMANT,
    }
    return codes.get(result.verdict, INCOMPLETE)


def _load(file: Path) -> Result:
    from ml4core_conformance.results import ResultError, load

    try:
        return load(file)
    except ResultError as error:
        raise UsageError(str(error)) from None


def _waivers(file: Path | None) -> Sequence[Waiver]:
    from ml4core_conformance.waivers import WaiverError, load

    if file is None and WAIVERS.is_file():
        file = WAIVERS
        output.note(f"waivers: {file.resolve()}")
    try:
        return load(file) if file else ()
    except WaiverError as error:
        raise UsageError(str(error)) from None


def _write(result: Result, json: Path | None, junit: Path | None, html: Path | None) -> None:
    if json:
        result.save(json)
    if junit:
        from ml4core_conformance.report.junit import write_junit

        write_junit(result, junit)
    if html:
        from ml4core_conformance.report.page import write_page

        write_page([result], html)


__all__ = ["USAGE", "app", "exit_code"]
