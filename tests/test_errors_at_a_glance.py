"""The table of errors at a glance, and README's rows of it, are what the validation page's own tables say."""

import re
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from statistics import mean

import pytest
from conftest import ROOT, tables

from evidence.validate.page import read_page

HEADINGS = "| part | what is compared | errors |"


def table(page: str) -> list[str]:
    """The lines of a page's table of errors, without its headings."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return text[text.index(HEADINGS) :].split("\n\n")[0].splitlines()[2:]


GLANCE = table("docs/validation.md")
PAGE = read_page(ROOT / "docs" / "validation.md")


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


FAMILIES = [Decimal(row[2].strip("%")) for row in cells("transfer") if len(row) == 7 and row[1].isdigit()]
SHOWN: dict[str, Callable[..., str]] = {
    "one": one,
    "ours": ours,
    "span": lambda *of: span(errors(*of)),
    "size": lambda *of: size(errors(*of)),
    "mean": lambda *of: size([mean(map(abs, errors(*of)))]),
    "means": lambda part, what, quantity: size(means(part, what, quantity)),
    "medians": lambda part, what, quantity: size(means(part, what, quantity, 5)),
    "p90s": lambda part, what, quantity: size(means(part, what, quantity, 6)),
    "worst": lambda _: size([max(FAMILIES)]),
    "papers": lambda paper, column: next(r for r in cells("papers") if r[0] == paper and len(r) == 7)[int(column)],
    "peers": lambda column: next(row for row in cells("transfer") if row[0] == "all" and len(row) == 6)[int(column)],
}
#: What each row says of the errors; {WHAT; PART; CASE; QUANTITY} stands for one of `SHOWN`.
STATED: dict[str, str] = tables("glance")


def filled(text: str) -> str:
    def shown(found: re.Match[str]) -> str:
        what, *arguments = found[1].split("; ")
        return SHOWN[what](*arguments)

    return re.sub(r"\{(.*?)\}", shown, text)


@pytest.mark.parametrize("row", STATED)
def test_the_errors_at_a_glance_are_those_of_the_page(row: str) -> None:
    assert any(f"| {filled(STATED[row])}" in line for line in GLANCE)


def test_there_is_no_row_of_errors_but_these() -> None:
    assert len(GLANCE) == len(STATED)
    # Word for word, but for the part's name, which stands once there.
    known = {line.split("|", 2)[2] for line in GLANCE}
    rows = table("README.md")
    assert len(rows) >= 5
    assert all(row.split("|", 2)[2] in known for row in rows)
