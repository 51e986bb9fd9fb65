"""`rlsim trace`: import, describe, fit and generate response-length traces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsim.base import catalogue
from rlsim.base.formats import Table, number, share, written
from rlsim.base.output import check_file
from rlsim.base.refusals import refuse
from rlsim.cli.common import PRINTED, Commands, echo, paths_only, say, say_notes, tokens_of, write_json
from rlsim.cli.tables import NO_BREAK, print_tables
from rlsim.errors import TraceError

if TYPE_CHECKING:
    from rlsim.trace.fit import LengthFit
    from rlsim.trace.schema import Trace

_MOST_EPOCHS = 4  # that the table of a description has columns for

app = Commands(
    no_args_is_help=True,
    help="Response-length traces: import, describe, fit, generate.",
    epilog="Example: rlsim trace describe deepscaler-llama-3.1-8b --cap 24K",
)


@app.command("import")
def import_(
    file: Path,
    out: Path,
    format: str | None = None,  # noqa: A002 - the option's name
    column: list[str] | None = None,
    cap: str | None = None,
    name: str | None = None,
    source: str = "",
    tokenizer: Path | None = None,
    derive: bool = False,
    batch: str | None = None,
    json_file: Path | None = None,
    quiet: bool = False,
) -> None:
    """Read another program's rollouts or trace and write them in rlsim's schema.

    \b
    Example: rlsim trace import rollouts/ mine.parquet --tokenizer Qwen3-8B/
    Example: rlsim trace import rollout.jsonl lengths.parquet --column response_tokens=output_len --cap 16K
    Example: rlsim trace import verl.log made-up.parquet --derive --cap 16K
    """
    from rlsim.trace.files import write_trace
    from rlsim.trace.importers import files_of, import_trace

    check_file(out, TraceError, inputs=files_of(file))
    columns, cap_tokens = _columns(column or ()), tokens_of("--cap", cap)
    refuse("rlsim trace import", TraceError, batch=batch, derive=derive)
    if derive:
        trace = _derived(file, batch, cap_tokens, name, source, {"--format": format, "--tokenizer": tokenizer,
                                                                "--column": column})  # fmt: skip
    else:
        trace = import_trace(file, format=format, columns=columns, cap_tokens=cap_tokens, name=name, source=source,
                             tokenizer=tokenizer)  # fmt: skip
    write_trace(trace, out)
    prompts = trace.frame["prompt_id"].nunique()
    data = {"file": str(out), "responses": len(trace), "prompts": prompts, "notes": [*trace.meta.notes]}
    if write_json(json_file, data) or paths_only(quiet, out):
        return
    echo(f"wrote {out}: {len(trace):,} responses of {prompts:,} prompts")
    say_notes(trace.meta.notes)


def _columns(pairs: Iterable[str]) -> dict[str, str]:
    """Column of the schema -> the file's, as `--column` names them."""
    columns = {}
    for pair in pairs:
        ours, equals, theirs = pair.partition("=")
        refuse("--column", TraceError, pair=pair, known=ours.strip() and equals and theirs.strip())
        columns[ours.strip()] = theirs.strip()
    return columns


def _derived(
    file: Path, batch: str | None, cap_tokens: int | None, name: str | None, source: str, others: dict[str, object]
) -> Trace:
    from rlsim.frameworks.verl.lengths import batch_size, derive_trace

    foreign = [option for option, value in others.items() if value and value != "verl-metrics"]
    refuse("--derive", TraceError, foreign=foreign)
    prompts, responses = batch_size(batch) if batch is not None else (None, None)
    return derive_trace(file, prompts=prompts, responses=responses, cap_tokens=cap_tokens, name=name, source=source)


def _read(file: Path) -> Trace:
    """The trace in a file, or the shipped one of that name."""
    from rlsim.trace.files import read_trace

    return read_trace(file if file.exists() else catalogue.names("traces", ".parquet").get(str(file), file))


@app.command("describe")
def describe_(
    file: Path,
    cap: str | None = None,
    above: str = "",
    chart: Path | None = None,
    json_file: Path | None = None,
    quiet: bool = False,
) -> None:
    """Print quantiles, share at the cap and correlation within prompts.

    Example: rlsim trace describe deepscaler-llama-3.1-8b --cap 24K
    """
    from rlsim.trace.describe import describe

    if chart is not None:
        check_file(chart, TraceError, inputs=(file,))
    limits = [value for text in above.split(",") if text.strip() and (value := tokens_of("--above", text.strip()))]
    cap_tokens = tokens_of("--cap", cap)
    trace = _read(file)
    description = describe(trace, cap_tokens, limits)
    if chart is not None:
        from rlsim.base.charts import save_chart
        from rlsim.results.report.lengths import trace_chart

        save_chart(trace_chart(trace, cap_tokens), chart, TraceError)
    if write_json(json_file, description) or paths_only(quiet, chart):
        return
    _print_description(description)
    if chart is not None:
        echo(f"wrote {chart}")


def _print_description(description: dict[str, Any]) -> None:
    """Prints a table with a column for the whole, each task, and each epoch, of many epochs only some."""
    parts = description["parts"]
    first, shown = parts[0], _shown(parts)
    rows = written("lengths", shown)
    rows |= {name: [number(part["quantiles"][name], 0) for part in shown] for name in first["quantiles"]}
    cap = first["cap_tokens"]
    marked = not cap or (first["share_at_cap"] and first["max_tokens"] < cap)
    at_cap = "share marked as cut" if marked else f"share at the cap of {cap:,}"
    rows |= written("longest", shown) | {at_cap: [share(part["share_at_cap"], 2) for part in shown]}
    rows |= {
        f"share above {at:,}": [share(part["share_above"][at], 2) for part in shown] for at in first["share_above"]
    }
    rows |= written("more", shown, first=first)
    headings = ["", *(part["part"].replace(" ", NO_BREAK) for part in shown)]
    title = f"Response lengths of {description['name']} (tokens)"
    print_tables([Table(title, headings, [[name, *values] for name, values in rows.items()])])
    if description["source"]:
        say(f"source: {description['source']}")
    if len(shown) < len(parts):
        say(f"{len(shown)} of {len(description['parts'])} columns: --json has the rest")
    say_notes(description["notes"])


def _shown(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All parts, but of many epochs only some, the first and the last among them."""
    epochs = [part for part in parts if part["part"].startswith("epoch ")]
    if len(epochs) <= _MOST_EPOCHS:
        return list(parts)
    kept = {round(i * (len(epochs) - 1) / (_MOST_EPOCHS - 1)) for i in range(_MOST_EPOCHS)}
    return [part for part in parts if part not in epochs] + [epochs[i] for i in sorted(kept)]


@app.command("fit")
def fit_(
    file: Path,
    cap: str | None = None,
    out: Path | None = None,
    components: int = 2,
    json_file: Path | None = None,
    quiet: bool = False,
) -> None:
    """Fit a censored lognormal mixture with the share the prompt has in it.

    Example: rlsim trace fit deepscaler-llama-3.1-8b --cap 24K --out fit.yaml
    """
    from rlsim.trace.fit import check_fit_name, fit_trace, save_fit

    if out is not None:
        check_fit_name(out)
        check_file(out, TraceError, inputs=(file,))
    fit = fit_trace(_read(file), tokens_of("--cap", cap), components=components)
    if out is not None:
        save_fit(fit, out)
    if write_json(json_file, fit.model_dump(mode="json")) or paths_only(quiet, out):
        return
    _print_fit(fit)
    if out is not None:
        echo(f"wrote {out}")


def _print_fit(fit: LengthFit) -> None:
    good = fit.goodness
    both = (
        ("share at the cap", good.share_at_cap_trace, good.share_at_cap_fit),
        ("correlation within a prompt (log)", good.icc_trace, good.icc_fit),
        ("sd of log length within a prompt", good.within_sd_trace, good.within_sd_fit),
        ("prompts with a response in the longest 1%", good.straggling_prompts_trace, good.straggling_prompts_fit),
    )
    rows = [(name, *(number(value, 4) for value in values)) for name, *values in both]
    parts = written("components", enumerate(fit.model.components, 1))
    print_tables([Table.of(f"Fit of {fit.provenance.trace}", parts)])
    if len(fit.model.components) > 1 and good.icc_trace is not None:
        echo(f"share of the prompt in which component a response falls into: {fit.model.runaway_share:.2f}")
    print_tables([Table("How well it fits", ("", "trace", "fit"), rows)])
    echo(f"KS distance {good.ks:.4f}; of a single lognormal {good.ks_single_lognormal:.4f}")
    say_notes(fit.notes)


@app.command("generate")
def generate_(
    recipe: Path, out: Path | None = None, check_only: bool = False, json_file: Path | None = None, quiet: bool = False
) -> None:
    """Generate a trace from a recipe, after checking that it meets the recipe's facts.

    Example: rlsim trace generate traces/deepscaler-llama-3.1-8b.yaml --check-only
    """
    from rlsim.trace.files import read_trace, write_trace
    from rlsim.trace.generate import check, draw_trace, load_recipe, require

    loaded = load_recipe(recipe)
    target = out or recipe.with_suffix(".parquet")
    if not check_only:
        check_file(target, TraceError, inputs=(recipe,))
    foreign = out is None and not check_only and target.exists() and read_trace(target).meta.recipe is None
    refuse("rlsim trace generate", TraceError, target=target, foreign=foreign)
    trace = draw_trace(loaded)
    checks = check(loaded, trace)
    if not write_json(json_file, [{**asdict(one), "ok": one.ok} for one in checks]) and not quiet:
        if checks:
            print_tables([Table.of("Facts", written("facts", checks))])
        else:
            echo("the recipe states no facts to check")
    require(loaded, checks)
    if check_only:
        return
    write_trace(trace, target)
    if json_file != PRINTED and not paths_only(quiet, target):
        echo(f"wrote {target}: {len(trace):,} responses of {loaded.prompts:,} prompts")
