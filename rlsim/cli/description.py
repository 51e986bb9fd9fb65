"""The table of `rlsim trace describe`."""

from __future__ import annotations

from collections.abc import Sequence

from rlsim.base.formats import number, share
from rlsim.cli.tables import NO_BREAK, print_tables, table
from rlsim.cli.terminal import Console
from rlsim.trace.describe import Description, Summary

MOST_EPOCHS = 4  # that the table has columns for


def print_description(description: Description) -> None:
    """Prints a table with a column for the whole, each task, and each epoch, of many epochs only some."""
    first = description.parts[0]
    rows: dict[str, list[str]] = {}
    shown = _shown(description.parts)
    for part in shown:
        sizes = ", ".join(f"{count:,} × {size}" for size, count in part.samples_per_prompt.items())
        cells = {
            "responses": number(part.responses, 0),
            "prompts × samples": sizes,
            "mean": number(part.mean_tokens, 0),
        }
        cells |= {name: number(value, 0) for name, value in part.quantiles.items()}
        cells |= {"longest": number(part.max_tokens, 0), "longest / median": number(part.max_over_median, 1)}
        at_cap = f"share at the cap of {first.cap_tokens:,}" if first.cap_tokens else "share marked as cut"
        cells |= {at_cap: share(part.share_at_cap, 2)}
        cells |= {f"share above {limit:,}": share(value, 2) for limit, value in part.share_above.items()}
        cells |= {
            "correlation within a prompt (log)": number(part.icc_log, 3),
            "sd of log length within a prompt": number(part.within_sd_log, 3),
            "prompts with a response in the longest 1%": share(part.straggling_prompts, 2),
            "  the same, responses shuffled": share(part.straggling_prompts_shuffled, 2),
            "median prompt": number(part.prompt_tokens_median, 0),
        }
        cells |= _reward_cells(part, first) | _turn_cells(part, first)
        for name, value in cells.items():
            rows.setdefault(name, []).append(value)
    headings, title = (
        ["", *(part.part.replace(" ", NO_BREAK) for part in shown)],
        f"Response lengths of {description.name} (tokens)",
    )
    print_tables([table(headings, [[name, *values] for name, values in rows.items()], title=title)])
    say = Console(soft_wrap=True).print
    if description.source:
        say(f"source: {description.source}")
    if len(shown) < len(description.parts):
        say(f"{len(shown)} of {len(description.parts)} columns: --json has the rest")
    for note in description.notes:
        say(f"note: {note}")


def _turn_cells(part: Summary, first: Summary) -> dict[str, str]:
    """The cells of a part in the rows on tool calls, where the whole trace (`first`) has any."""
    if first.tool_calls_mean is None:
        return {}
    cells = {
        "tool calls of a response": f"{number(part.tool_calls_mean, 1)} mean, {number(part.tool_calls_max, 0)} at most",
        "tokens generated in a turn": f"{number(part.turn_tokens_median, 0)} median",
        "share that tools returned": share(part.observed_share, 1),
    }
    if first.call_s_mean is not None:
        cells["a tool call (s)"] = f"{number(part.call_s_mean, 2)} mean, {number(part.call_s_p95, 1)} P95"
        cells["a response in tool calls (s)"] = (
            f"{number(part.tool_s_mean, 1)} mean, {number(part.tool_s_max, 0)} at most"
        )
        cells["  correlation within a prompt (log)"] = number(part.tool_s_icc_log, 3)
    return cells


def _reward_cells(part: Summary, first: Summary) -> dict[str, str]:
    """The cells of a part in the rows on rewards, for those reward columns that the whole trace (`first`) has."""
    cells: dict[str, str] = {}
    if first.correct_share is not None:
        cells |= {"right": share(part.correct_share, 2), "prompts with right and wrong": share(part.mixed_prompts, 2)}
    if first.reward_mean is not None:
        lowest, highest = number(part.reward_min, 2), number(part.reward_max, 2)
        cells |= {"mean reward": number(part.reward_mean, 3), "lowest to highest": f"{lowest} to {highest}"}
    if first.reward_time_mean_s is not None:
        cells["mean reward call (s)"] = number(part.reward_time_mean_s, 2)
        cells["longest reward call (s)"] = number(part.reward_time_max_s, 2)
    if first.longest_test_run_mean_s is not None:
        cells["mean of the longest test case (s)"] = number(part.longest_test_run_mean_s, 2)
    if first.judge_tokens_mean is not None:
        cells["mean answer of the judge"] = number(part.judge_tokens_mean, 0)
    return cells


def _shown(parts: Sequence[Summary]) -> list[Summary]:
    """All parts, but of many epochs only some, the first and the last among them."""
    epochs = [part for part in parts if part.part.startswith("epoch ")]
    if len(epochs) <= MOST_EPOCHS:
        return list(parts)
    kept = {round(i * (len(epochs) - 1) / (MOST_EPOCHS - 1)) for i in range(MOST_EPOCHS)}
    return [part for part in parts if part not in epochs] + [epochs[i] for i in sorted(kept)]
