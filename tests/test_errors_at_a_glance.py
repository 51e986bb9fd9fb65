"""The table of errors at a glance, and README's rows of it, are what the validation page's own tables say."""

import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import mean

import pytest

from evidence.validate.page import read_sections

ROOT = Path(__file__).parents[1]
HEADINGS = "| part | what is compared | errors |"


def table(page: str) -> list[str]:
    """The lines of a page's table of errors, without its headings."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return text[text.index(HEADINGS) :].split("\n\n")[0].splitlines()[2:]


GLANCE = table("docs/validation.md")
PAGE = read_sections(ROOT / "docs" / "validation.md")


def cells(part: str) -> list[list[str]]:
    """The cells of all table rows of a part of the page."""
    rows = [row for row in PAGE[part].splitlines() if row.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def errors(part: str, case: str, quantity: str, kind: str = "output|input") -> list[Decimal]:
    """Errors, percent, of the predictions whose case, quantity and kind are these regular expressions as a whole."""
    found = [
        Decimal(row[5].strip("%"))
        for row in cells(part)
        if len(row) == 8
        and all(re.fullmatch(*one) for one in ((case, row[0]), (quantity, row[1]), (kind, row[2])))
        and re.fullmatch(r"[+-][\d.]+%", row[5])
    ]
    assert found, (part, case, quantity)
    return found


def means(part: str, what: str, quantity: str, column: int = 4) -> list[Decimal]:
    """Mean errors, percent (median: column 5, p90: 6), of the groups, from the tables over many rows."""
    found = [
        Decimal(row[column].strip("%"))
        for row in cells(part)
        if len(row) == 8 and row[2] in ("left-out", "output") and re.fullmatch(what, row[0])
        and re.fullmatch(quantity, row[1]) and re.fullmatch(r"[+-][\d.]+%", row[7])
    ]  # fmt: skip
    assert found, (part, what, quantity)
    return found


def number(value: Decimal) -> int:
    return int(value.quantize(Decimal(1), ROUND_HALF_UP))


def sign(value: Decimal) -> str:
    """As README writes an error."""
    return f"{number(value):+d}%".replace("-", "−").replace("+0%", "0%")


def span(values: list[Decimal]) -> str:
    """As README writes a range of errors."""
    return f"{sign(min(values))} to {sign(max(values))}"


def size(values: list[Decimal]) -> str:
    """As README writes a range of sizes of errors."""
    low, high = (number(edge([abs(value) for value in values])) for edge in (min, max))
    return f"{low} to {high}%" if low < high else f"{low}%"


def one(part: str, case: str, quantity: str, kind: str = "output|input") -> str:
    """As README writes the error of one prediction."""
    (value,) = errors(part, case, quantity, kind)
    return sign(value)


def ours(part: str, case: str, quantity: str) -> str:
    """rlsim's figure, the published one, and the error."""
    (row,) = [row for row in cells(part) if len(row) == 8 and row[:2] == [case, quantity]]
    return f"{row[4]} for {row[3]} ({sign(Decimal(row[5].strip('%')))})"


def rollpacker(size_b: str, suffix: str) -> str:
    parts = f"{size_b}-(tail-batching|reward|planner|rollpacker){suffix}"
    return f"{span(errors('rollpacker', parts, 'speedup'))}, as a whole " + ours(
        "rollpacker", f"{size_b}-rollpacker{suffix}", "speedup"
    )


def transferred(engine: str) -> str:
    return size(means("transfer", engine, "tpot_s"))


def today(quantity: str, column: int = 4) -> str:
    return size(means("transfer", "today", quantity, column))


def pat(engine: str) -> str:
    verl, own = f"h100-24k{engine}-verl", f"h100-24k{engine}"
    seconds = [one("pat", case, quantity) for quantity in ("gen_time_s", "step_time_s") for case in (verl, own)]
    return "generation {} and {}, step {} and {}".format(*seconds)


FAMILIES = [Decimal(row[2].strip("%")) for row in cells("transfer") if len(row) == 7 and row[1].isdigit()]
KERNELS = "h[12]00-sxm-(vllm|sglang|trtllm)"
H20, A100 = "verl/row-(10|11|12|28|29)", "verl/row-[234]"
ASYNC, TUNED = "asynchronous", "speedup over the tuned best"
STATED = {
    "kernels": lambda: (
        f"median {size(means('kernels', KERNELS, '.*', 5))}, p90 {size(means('kernels', KERNELS, '.*', 6))}"
    ),
    "transfer": lambda: (
        f"vLLM {transferred('vllm')}, SGLang {transferred('sglang')} (its fits leave nothing out), TensorRT-LLM "
        f"{transferred('trtllm')} (TP8 {transferred('trtllm/llama-3.1-8b/tp8')}); first token "
        f"{size(means('transfer', 'vllm|sglang|trtllm', 'ttft_s'))}"
    ),
    "today": lambda: (
        f"mean {today('tpot_s')}, median {today('tpot_s', 5)}, worst family "
        f"{size([max(FAMILIES)])}; first token {today('ttft_s')}"
    ),
    "peers": lambda: "{}, AISimulate {}; first token {}, {}".format(
        *next(row for row in cells("transfer") if row[0] == "all" and len(row) == 6)[2:]
    ),
    "rollout": lambda: (
        f"{size(errors('rollout', 'cpu/[a-z0-9]*', 'makespan_s'))}; single steps "
        f"{size(errors('rollout', 'cpu/[a-z0-9]*', 'step_median_error'))}"
    ),
    "pat, absolute": lambda: f"SGLang: {pat('')}; vLLM: {pat('-vllm')}",
    "pat, its claim": lambda: f"H100 {ours('pat', 'h100-24k', TUNED)}; A40, 16K {ours('pat', 'a40-16k', TUNED)}",
    "rollpacker": lambda: f"7B {rollpacker('7b', '-unfitted')}; 32B {rollpacker('32b', '-unfitted')}",
    "oppo": lambda: f"{span(errors('oppo', '.*', 'speedup'))}; {span(errors('oppo', '.*', '(share|GPUs).*'))}",
    "real, its own costs": lambda: (
        f"plan {one('real', 'published-plan', 'iteration_s')}, heuristic {one('real', 'heuristic', 'iteration_s')}, "
        f"gain {ours('real', 'published-plan', 'over the heuristic')}"
    ),
    "real, published calls": lambda: span(errors("real", ".*", "iteration_s, (scheduled|with outside)")),
    "weight syncs": lambda: span(errors("weight_sync", ".*", "sync_s", "output")),
    "nemo-rl": lambda: (
        f"{span(errors('steps', 'nemo-rl/.*', 'step_time_s'))}, gains {span(errors('steps', 'nemo-rl/.*', 'gain'))}"
    ),
    "nemo-rl, mixtures": lambda: (
        f"{span(errors('steps', 'nemo-rl-moe/.*', 'step_time_s'))}, gains "
        f"{span(errors('steps', 'nemo-rl-moe/.*', 'gain'))}"
    ),
    "megatron": lambda: (
        f"{span(errors('steps', 'megatron-moe/.*', 'iteration_s', 'output'))}, mean "
        f"{size([mean(map(abs, errors('steps', 'megatron-moe/.*', 'iteration_s', 'output')))])}"
    ),
    "trainers": lambda: "; ".join(
        span(errors("steps", f"prime-.*/qwen3-{case}", quantity))
        for case, quantity in (*((f"{size}b.*", "iteration_s") for size in ("4", "30", "0.6")), (".*", "peak_gib"))
    ),
    "verl": lambda: (
        f"A100 {span(errors('steps', A100, 'step_time_s'))}; H20 {span(errors('steps', H20, 'step_time_s'))}, "
        f"generation {span(errors('steps', H20, 'generate_s'))}"
    ),
    "realhf": lambda: (
        f"heuristic plans {span(errors('steps', 'realhf/llama-2-34b/heuristic/.*', 'step_time_s'))}, searched ones "
        f"{span(errors('steps', 'realhf/llama-2-34b/searched/.*', 'step_time_s'))}"
    ),
    "areal": lambda: (
        f"{span(errors(ASYNC, 'areal/(synchronous|eta4)', 'step_time_s'))}; gain {one(ASYNC, 'areal/eta4', 'gain')}"
    ),
    "verl, relaxed": lambda: (
        f"one step off {one(ASYNC, 'verl/one-step-off-16', 'step_time_s')}, gain "
        f"{one(ASYNC, 'verl/one-step-off-16', 'gain')}; fully {one(ASYNC, 'verl/fully-async-32', 'step_time_s')}, gain "
        f"{one(ASYNC, 'verl/fully-async-32', 'gain')}"
    ),
    "runs of 2026": lambda: (
        f"okoge {span(errors(ASYNC, 'okoge/.*', 'step_time_s'))}; px {span(errors(ASYNC, 'px/.*', 'step_time_s'))}, "
        f"its updates {span(errors(ASYNC, 'px/.*', 'train_s'))}"
    ),
    "verl v1": lambda: (
        f"{span(errors(ASYNC, 'verl-v1/.*', 'step_time_s'))}, gain {one(ASYNC, 'verl-v1/separate-async-24', 'gain')}; "
        f"{span(errors(ASYNC, 'verl-v1-ahead/.*', 'step_time_s'))}, gain "
        f"{one(ASYNC, 'verl-v1-ahead/separate-async-24', 'gain')}"
    ),
}


@pytest.mark.parametrize("row", STATED)
def test_the_errors_at_a_glance_are_those_of_the_page(row: str) -> None:
    assert any(f"| {STATED[row]()}" in line for line in GLANCE)


def test_there_is_no_row_of_errors_but_these() -> None:
    assert len(GLANCE) == len(STATED)


def test_the_readme_has_rows_of_them() -> None:
    """Word for word, but for the part's name, which stands once there."""
    known = {line.split("|", 2)[2] for line in GLANCE}
    rows = table("README.md")
    assert len(rows) >= 5
    assert all(row.split("|", 2)[2] in known for row in rows)
