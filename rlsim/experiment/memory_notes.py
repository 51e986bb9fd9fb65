"""What to know of memory though all fits: the worst that can meet, and a KV cache too small for its batch."""

from __future__ import annotations

import math

import numpy as np

from rlsim.cost.memory import kv_shape
from rlsim.experiment.placed import PlacedExperiment

#: The largest share of memory that is advised.
MOST_SHARE = 0.95


def worst_note(placed: PlacedExperiment) -> str:
    """Which micro-batch does not fit if the longest sequences that the limits allow meet in it; empty if all fit."""
    memory, plan, trace = placed.memory, placed.plan, placed.loaded.experiment.trace
    ledger = placed.ledger_of(plan, worst=True)
    over = memory.over(ledger)
    name = max(over, key=over.__getitem__, default="")
    strategy = plan.of(name).strategy if name else None
    if strategy is None or over[name] <= 0:
        return ""
    call, longest = placed.workflow.call(name), placed.loaded.batch.limit_tokens
    met, worst = (memory.micro_batch_tokens(call, strategy, worst=worst) for worst in (False, True))
    limit = "trace.max_model_len" if trace.max_model_len else "the longest prompt and trace.cap"
    return (
        f"memory is enough for the trace's lengths, not for the longest that may meet: a micro-batch of {name} with "
        f"{round(worst / longest)} of {longest:,} tokens ({limit}) has {worst:,}, of the trace's at most {met:,}. "
        f"{memory.refusal(ledger, plan)}"
    )


def kv_note(placed: PlacedExperiment, tp: int) -> str:
    """What the KV cache of a replica at `tp` lacks for the responses that a step gives it; empty if they find room.

    Of the responses that run at once; they begin together, or take the place of others where there are more.
    """
    loaded, costs, gpus = placed.loaded, placed.rollout_costs, len(placed.generation.gpus)
    workflow, engine = loaded.experiment.workflow, loaded.engine
    memory, shape = costs.memory(tp), kv_shape(loaded.model, loaded.replica.attention_tp(tp // placed.rollout_pp))
    given = math.ceil(workflow.prompts * loaded.launched_responses * tp / gpus)
    running = min(given, engine.max_num_seqs)
    prompt, lengths = loaded.mean_prompt * (not engine.enable_prefix_caching), np.sort(loaded.response_lengths)
    at = np.linspace(0, len(lengths) - 1, 65).astype(int)
    left = 1.0 - at / len(lengths)  # of the responses when those of this length end

    def units(tokens: float) -> float:
        return shape.units(math.ceil(tokens), engine.page_tokens)

    each = max(
        share * units(prompt + length) for share, length in zip(left.tolist(), lengths[at].tolist(), strict=True)
    )
    if given > running:
        each = max(each, units(prompt + float((lengths**2).mean() / lengths.mean() / 2)))
    have, tokens = memory.pages * shape.page_units, engine.page_tokens / shape.page_units
    if running * each <= have:
        return ""
    pages = running * each / shape.page_units / loaded.replica.attention_dp / (1 - engine.watermark)
    share = math.ceil(1000 * costs.share_for(tp, pages)) / 1000
    enough = f"memory_utilization {share:g} would hold them"
    if share > MOST_SHARE:
        enough = f"no memory_utilization up to {MOST_SHARE} would hold them; a larger tp has room for more"
    mean, worst = (int(running * of * tokens) for of in (each, units(loaded.longest_sequence)))
    return (
        f"KV cache: a replica of {tp} GPU{'s' * (tp > 1)} has room for {int(have * tokens):,} tokens; the {running:,} "
        f"responses that run there at once, of {given:,} a step, need about {mean:,} ({worst:,} if all were the "
        f"longest), so that responses wait or are preempted; {enough}"
    )
