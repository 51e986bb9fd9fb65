"""`rlsim validate`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evidence.validate.parts import PARTS, REPEATABLE
from rlsim.base.formats import Table
from rlsim.cli import complete
from rlsim.cli.common import PRINTED, write_json
from rlsim.cli.tables import print_tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evidence.validate.parts import Section
    from evidence.validate.rows import Kept, Targets
    from rlsim.cli.terminal import Console

#: Parts with more comparisons than these show their summaries.
_ROWS_SHOWN = 80


def validate(
    parts: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"{', '.join(PARTS)} (default: all).", show_default=False, autocompletion=complete.one_of(*PARTS)
        ),
    ] = None,
    json_file: Path | None = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of kernel tables (default: $RLSIM_DATA, or ../shared/data).")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Write the parts' sections of this Markdown page.")] = None,
    check: Annotated[Path | None, typer.Option(help="Fail if the parts' sections of this page are stale.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes for the real rollouts.")] = False,
    device: Annotated[str, typer.Option(help="Device of the real rollouts: cpu or cuda.")] = "cpu",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only what is beyond its bound.")] = False,
) -> None:
    """Compare rlsim with what was measured: kernels, whole engines, real rollouts, published figures.

    Rows come from the folder evidence of a clone, or from $RLSIM_EVIDENCE.
    Exit code 1 if an error is beyond its bound or the checked page is stale.

    Example: rlsim validate pat --json pat.json
    """
    from evidence.validate.page import check_page, read_page, stale, write_page
    from evidence.validate.parts import Options, kernel_folder, run_part
    from evidence.validate.rows import bounds_of, load_targets
    from rlsim.cli.terminal import Console
    from rlsim.errors import ConfigError

    if page is not None:
        check_page(page)
    if check is not None:
        read_page(check)
    errors, console = Console(stderr=True), Console(stderr=json_file == PRINTED, soft_wrap=True)
    told = (lambda _: None) if quiet else partial(errors.print, style="dim")
    options = Options(kernels=kernel_folder(data), quick=quick, device=device, progress=told)
    found: dict[str, Section] = {}
    targets, fine = load_targets(options.evidence), True
    for name in parts or PARTS:
        result = run_part(name, options)
        if isinstance(result, str):
            console.print(f"{name}: skipped: {result}", soft_wrap=False)
            continue
        found[name] = result
        bounds = bounds_of(targets, result.rows, result.summaries)
        if not quiet:
            _print(name, result, targets, bounds, console)
        for b in (bound for bound in bounds if not bound.fine):
            text = f"{b.what} {b.quantity}: {b.statistic} error {b.value:.1%} is beyond its bound of {b.limit:.1%}"
            console.print(text, style="bold red")
            fine = False
        if not quiet:
            console.print()
    if not found:
        raise ConfigError("no part of the validation could run here")
    records = [row.record() for one in found.values() for row in (one.summaries if one.summarised else one.rows)]
    tables = [{"part": name, "tables": dict(one.tables)} for name, one in found.items() if not one.rows]
    write_json(json_file, [*records, *tables])
    if page is not None:
        write_page(page, found, targets)
    if check is not None:
        for name in stale(check, found, targets, REPEATABLE):
            fine = False
            typer.echo(f"{check}: tables of {name} are stale; run: rlsim validate {name} --page {check}", err=True)
    if not fine:
        raise typer.Exit(1)


def _print(name: str, section: Section, targets: Targets, bounds: Sequence[Kept], console: Console) -> None:
    """One part's comparisons, or their summaries where they are many, and what they come to."""
    from evidence.validate.rows import verdicts

    remarks: dict[str, list[str]] = {}
    if len(section.rows) <= _ROWS_SHOWN and not section.summarised:
        headings = ["what", "quantity", "kind", section.reference, "rlsim", "error", "target"]
        rows = [[*row.cells, targets.cell(row).replace("**", "")] for row in section.rows]
        for row in section.rows:
            remarks.setdefault(row.note, []).append(f"{row.case}, {row.quantity}")
    else:
        headings = ["what", "quantity", "kind", "rows", "mean |error|", "median", "p90", "bias"]
        rows = [[*summary.cells] for summary in section.summaries]
    if rows:
        print_tables([Table(name, headings, rows, words=(0, 1, 2), prose=0)], stderr=console.stderr)
    else:  # a part of tables alone
        console.print(f"{name}\n", style="bold")
        for text in section.tables.values():
            console.print(text)
    for remark, of in remarks.items():
        if remark:
            console.print(f"{'; '.join(of)}: {remark}", style="dim")
    for line in verdicts(targets, section.rows, bounds):
        console.print(line)
