"""Part `sensitivity`: how far the published figures depend on what the papers leave open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rlsim.validate import oppo, pat, real, rollpacker_settings
from rlsim.validate.parts import Options, Section
from rlsim.validate.pat_settings import Outcome, outcomes
from rlsim.validate.rows import markdown

_INTRODUCTION = """\
The experiments of the sections before with one input changed at a time. CI does not repeat these tables: they take as
long as all else together, and nothing is measured in them. `rlsim validate sensitivity --page docs/validation.md`
writes them.

"""

_DECIDES = """
### What decides between PAT and the tuned static TP

The H100 experiment with one setting changed at a time: generation time in seconds a step, and PAT's speedup over the
fastest static TP and over TP2.

"""

_FINDING = """
What it comes to: PAT gains over a well-chosen static TP only where the full batch and the tail want different TPs, and
by more than the switches cost. On eight H100s with 128 responses a step it does not: over the fastest static TP its
generation is {engines} times as fast under the three engines, and {short} where lengths stay below the cap or the cap
is low, for it assumes that every sequence runs to the cap and pays switches that never pay back. With 512 and 2,048
responses it is {many} times as fast. Over static TP2 it gains nearly everywhere ({over_tp2}).

Two things drive the switches. Host time per sequence, which a large TP cannot shrink, favours small TP while the batch
is full. And vLLM's measured decode attention is not smooth: with one KV head a GPU (TP8) 16 sequences take as long as
32, 2.6 times as long as the same KV bytes at TP1, so that TP2 and TP4 overtake each other several times as the batch
drains, and PAT under vLLM follows, paying each time.
"""


_OPEN = """
### What RollPacker's figures depend on

One input that the papers leave open is changed at a time; one seed, ten steps. Speedups over veRL under the same
change.

"""


_REAL = """
### What REAL's calls depend on

One input changed at a time, then all; ratios are rlsim / published over the six calls.

"""

_OPPO = """
### What OPPO's speedups depend on

"""


def section(options: Options) -> Section:
    """Every setting of every system (about five minutes)."""
    options.progress("sensitivity: PAT")
    found = tuple(outcomes())
    options.progress("sensitivity: RollPacker, OPPO, REAL")
    text = "".join(
        (
            *(_INTRODUCTION, _DECIDES, _decides(found), _finding(found)),
            *(_OPEN, *_open_tables()),
            *(_OPPO, oppo.open_inputs(), _REAL, real.open_inputs()),
        )
    )
    return Section((), (), text)


def _open_tables() -> Iterator[str]:
    for heading, found in (
        ("7B, 8K, 16 GPUs", rollpacker_settings.cumulative("rollpacker_7b")),
        ("32B, 32K, 64 GPUs", rollpacker_settings.cumulative("rollpacker_32b")),
        ("adaptive timeouts, 7B, code", rollpacker_settings.timeouts()),
        ("preemptions, Qwen3-8B, 32K, 8 GPUs", rollpacker_settings.preemptions()),
        ("the strengthened RLHFuse, 7B", rollpacker_settings.fused()),
    ):
        settings = list(found)
        names = list(dict.fromkeys(name for setting in settings for name in setting.figures))
        rows = [(s.what, *(_figure(s.figures.get(name)) for name in names)) for s in settings]
        yield markdown((heading, *names), rows) + "\n"


def _figure(value: float | None) -> str:
    return "—" if value is None or value != value else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _finding(found: Iterable[Outcome]) -> str:
    """The conclusion with the ranges of PAT's speedups of generation in the table above it."""
    best = {one.setting: one.best_static_s / one.gen_time_s["pat"] for one in found}
    tp2 = [one.gen_time_s["verl-tp2"] / one.gen_time_s["pat"] for one in found if "verl-tp2" in one.gen_time_s]
    groups = {"engines": ("as shipped", "engine"), "short": ("cap 8K", "lengths: RollPacker"), "many": ("512", "2,048")}
    values = {key: [v for name, v in best.items() if name.startswith(begins)] for key, begins in groups.items()}
    return _FINDING.format(**{key: f"{min(v):.2f} to {max(v):.2f}" for key, v in ({**values, "over_tp2": tp2}).items()})


def _decides(found: Iterable[Outcome]) -> str:
    rows = []
    for outcome in found:
        times = outcome.gen_time_s
        static = [f"{times[name]:.1f}" if name in times else "—" for name in pat.STATIC]
        over_tp2 = f"{times['verl-tp2'] / times['pat']:.2f}" if "verl-tp2" in times else "—"
        over_best = f"{outcome.best_static_s / times['pat']:.2f}"
        rows.append((outcome.setting, *static, f"{times['pat']:.1f}", over_best, over_tp2, f"{outcome.switches:.1f}"))
    return markdown(("setting", "TP1", "TP2", "TP4", "TP8", "PAT", "over best", "over TP2", "switches"), rows)
