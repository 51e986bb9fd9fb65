"""`rlsim validate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlsim.cli import complete
from rlsim.validate.parts import PARTS, REPEATABLE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rlsim.validate.parts import Options, Section

#: Parts with more comparisons than these show their summaries.
_ROWS_SHOWN = 80
_WIDTH = 120  # where there is no terminal


def validate(
    parts: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"{', '.join(PARTS)} (default: all).", show_default=False, autocompletion=complete.one_of(*PARTS)
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every comparison to this file.")] = None,
    evidence: Annotated[
        Path | None, typer.Option(help="Folder of measured and published rows (default: that of the clone).")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of kernel tables (default: $RLSIM_DATA, or ../shared/data).")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Write the parts' sections and charts of this Markdown page.")
    ] = None,
    check: Annotated[Path | None, typer.Option(help="Fail if the parts' sections of this page are stale.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes for the real rollouts.")] = False,
    device: Annotated[str, typer.Option(help="Device of the real rollouts: cpu or cuda.")] = "cpu",
) -> None:
    """Compare rlsim with what was measured: kernels, whole engines, real rollouts, published figures.

    Exit code 1 if an error is beyond its bound or the checked page is stale.

    Example: rlsim validate pat --json pat.json
    """
    from rlsim.errors import ConfigError
    from rlsim.output import check_file
    from rlsim.validate.page import check_page, read_page, stale, write_page
    from rlsim.validate.parts import Options, kernel_folder

    wanted = parts or list(PARTS)
    if json_file is not None:
        check_file(json_file)
    if page is not None:
        check_page(page, wanted)
    if check is not None:
        read_page(check)
    rows = {} if evidence is None else {"evidence": evidence}
    found, fine = _run(wanted, Options(kernels=kernel_folder(data), quick=quick, device=device, progress=_log, **rows))
    if not found:
        raise ConfigError("no part of the validation could run here")
    if json_file is not None:
        _write_json(json_file, found.values())
    if page is not None:
        write_page(page, found)
    if check is not None:
        for name in stale(check, found, REPEATABLE):
            fine = False
            typer.echo(f"{check}: section {name} is stale; run: rlsim validate {name} --page {check}", err=True)
    if not fine:
        raise typer.Exit(1)


def _log(text: str) -> None:
    from rlsim.cli.terminal import Console

    Console(stderr=True).print(text, style="dim")


def _run(wanted: Iterable[str], options: Options) -> tuple[dict[str, Section], bool]:
    """Run and print the parts; what each found, and whether all errors are within their bounds."""
    from rlsim.cli.terminal import Console
    from rlsim.validate.parts import Skipped, run_part

    found: dict[str, Section] = {}
    fine = True
    for name in wanted:
        result = run_part(name, options)
        if isinstance(result, Skipped):
            Console().print(f"{name}: skipped: {result.reason}")
            continue
        found[name] = result
        fine &= _print(name, result)
    return found, fine


def _write_json(path: Path, sections: Iterable[Section]) -> None:
    from rlsim.output import write_text

    shown = (section.summaries if section.summarised else section.rows for section in sections)
    records = [row.record() for rows in shown for row in rows]
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    write_text(path, f"[\n{lines}\n]\n")


def _print(name: str, section: Section) -> bool:
    """One part's comparisons, or their summaries where they are many; whether all are within their bounds."""
    from rich.table import Table

    from rlsim.cli.terminal import Console
    from rlsim.validate.bounds import checked

    console = Console()
    console = console if console.is_terminal else Console(width=_WIDTH)
    table = Table(box=None, pad_edge=False, header_style="bold", title=f"{name}", title_justify="left")
    few = len(section.rows) <= _ROWS_SHOWN and not section.summarised
    headings = ("measured", "rlsim", "error") if few else ("rows", "mean |error|", "median", "p90", "bias")
    for heading in ("what", "quantity", "kind"):
        table.add_column(heading)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for shown in section.rows if few else section.summaries:
        table.add_row(*shown.cells)
    console.print(table)
    bounds = list(checked(section.summaries))
    beyond = [
        f"{s.group} {s.quantity}: {bound.statistic} error {value:.1%} is beyond its bound of {bound.limit:.1%}"
        for s, bound, value, within in bounds
        if not within
    ]
    if bounds:
        console.print(f"{len(bounds) - len(beyond)} of {len(bounds)} bounds kept")
    for line in beyond:
        console.print(line, style="bold red")
    console.print()
    return not beyond
