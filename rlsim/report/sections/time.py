"""One step over time: what was generated when, with which layout, and what every GPU did."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlsim.report.charts.rollout import gantt_chart, generation_chart
from rlsim.report.frames.gantt import gantt
from rlsim.report.frames.rollout import MOMENTS, generation
from rlsim.report.page import Block, Figure, Section, Text
from rlsim.report.palette import kind_colours

if TYPE_CHECKING:
    from rlsim.experiment.result import Result
    from rlsim.report.choice import Choice
    from rlsim.report.frames.gantt import Gantt
    from rlsim.report.setups import CaseSetup


def chosen_text(choice: Choice) -> str:
    """Which step is shown, and why."""
    case = f"case {choice.case}, " if choice.case else ""
    return (
        f"Shown: {case}{' and '.join(choice.systems)}, seed {choice.seed}, step {choice.step} ({choice.why}). "
        "Options --case, --system, --seed and --step of rlsim report show another."
    )


def generation_section(result: Result, choice: Choice, setup: CaseSetup) -> Section:
    """Active sequences, batch and TP of the chosen step over time, with each switch."""
    blocks: list[Block] = [Text(chosen_text(choice))]
    found = {system: generation(result, choice, system) for system in choice.systems}
    until = max((shown.duration_s for shown in found.values() if shown), default=0.0)
    most = max((int(shown.sequences["active"].max()) for shown in found.values() if shown), default=0)
    for number, (system, shown) in enumerate(found.items(), 1):
        if shown is None:
            blocks.append(Text(f"{system} generated nothing in this step."))
            continue
        count = len(shown.switches)
        caption = (
            "Top: sequences in prefill or decoding. Middle: these, divided by the replicas at work. "
            "Bottom: GPUs at work, by TP degree (times PP, if a plan pipelines generation); white is idle or paused. "
            f"{MOMENTS} moments are drawn. "
        )
        caption += "All systems have the same time axis. " if len(found) > 1 else ""
        changes = f"Dashed: {count} change{'s' if count > 1 else ''} of a node's TP, from one degree to another."
        caption += changes if count else "No node changed its TP."
        title = _titled(f"Generation under {system}", result, choice, system)
        blocks.append(Figure(f"generation-{number}", title, generation_chart(shown, until, most, setup.gpus), caption))
    return Section("generation", "Generation over time", tuple(blocks))


def timeline_section(result: Result, choice: Choice, setup: CaseSetup) -> Section:
    """GPU timeline of the chosen step, one chart per system."""
    blocks: list[Block] = [Text(chosen_text(choice))]
    colours = kind_colours(set(result.spans["kind"]), result.calls)
    found = {system: gantt(result, choice, system, setup.gpus, setup.gpus_per_node) for system in choice.systems}
    until = max(shown.duration_s for shown in found.values())
    for number, (system, shown) in enumerate(found.items(), 1):
        chart = gantt_chart(shown, system, colours, until)
        title = _titled(f"GPUs under {system}: {shown.duration_s:,.1f} s", result, choice, system)
        blocks.append(Figure(f"timeline-{number}", title, chart, _timeline_caption(shown)))
    return Section("timeline", "What every GPU did", tuple(blocks))


def _timeline_caption(shown: Gantt) -> str:
    if shown.grouped:
        return (
            "Each row is a group of GPUs; the height that a colour takes of a row is the share of its GPUs that did "
            f"this work, in intervals of {shown.resolution_s:.2g} s. White is idle."
        )
    text = "Each row is a GPU; a block over several rows is one replica or call on all of them. White is idle. "
    if shown.beside:
        text += "A narrow strip at a row's lower edge is work beside other work on the same GPU. "
    return text + (
        f"Gaps below {shown.resolution_s:.2g} s are not drawn." if shown.resolution_s else "Every gap is drawn."
    )


def _titled(title: str, result: Result, choice: Choice, system: str) -> str:
    """The title, with the kind of round if there are several kinds."""
    steps = choice.rows(result.steps, system)
    label = str(steps.loc[steps["step"] == choice.step, "round"].iloc[0])
    return f"{title} ({label} round)" if label else title
