"""Every column of every result table: name, type, unit, meaning. Feeds the tables, their metadata and the docs."""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    """One column of a result table."""

    name: str
    dtype: str  # as pandas names it
    unit: str
    meaning: str


_RUN = (
    Column("case", "string", "", "name of the case in the experiment; empty if it has none"),
    Column("system", "string", "", "name of the system in the experiment, variants suffixed"),
    Column("seed", "int64", "", "seed of the run; systems with the same case and seed see the same responses"),
)
_STEP = (*_RUN, Column("step", "int64", "", "training step, from 0"))

#: What a call's time goes to; the parts of a call add up to its time on its GPUs.
CALL_PARTS = (
    Column("compute_s", "float64", "s", "computation, mean over data-parallel ranks"),
    Column("communication_s", "float64", "s", "communication that computation does not hide"),
    Column("bubble_s", "float64", "s", "pipeline fill and drain"),
    Column("optimizer_s", "float64", "s", "optimizer update"),
    Column("offload_s", "float64", "s", "copies to and from host memory"),
    Column("imbalance_s", "float64", "s", "waiting for the slowest data-parallel rank"),
    Column("weights_s", "float64", "s", "weights on their way to the calls that a sync serves"),
    Column("data_s", "float64", "s", "inputs on their way from the GPUs of the calls before"),
)

TABLES: dict[str, tuple[Column, ...]] = {
    "steps": (
        *_STEP,
        Column(
            "step_time_s", "float64", "s", "from the end of the step before to the end of the last call of this one"
        ),
        Column("steady", "bool", "", "counts in means: the pipeline of overlapping steps neither fills nor drains"),
        Column("round", "string", "", "kind of round, as the batching calls it; empty if there is one kind"),
        Column("gen_time_s", "float64", "s", "generation, from the first request to the last response"),
        Column(
            "gen_exposed_s",
            "float64",
            "s",
            "generation that the step waited for, its own or that of another step that holds back GPUs or weights",
        ),
        Column("prep_time_s", "float64", "s", "time in which reward or log-prob calls ran and generation did not"),
        Column("train_time_s", "float64", "s", "time in which training ran and none of those before did"),
        Column("sync_time_s", "float64", "s", "time in which only updated weights were on their way to other calls"),
        Column("waiting_time_s", "float64", "s", "time in which no call of any step ran: the rest of step_time_s"),
        Column("reward_time_s", "float64", "s", "reward calls, from their first response to the last score"),
        Column("tokens", "int64", "tokens", "prompt and response tokens that were trained on"),
        Column("trained_response_tokens", "int64", "tokens", "of `tokens`, those of responses: prompts are not in it"),
        Column("response_tokens", "int64", "tokens", "tokens generated in the step, wasted ones included"),
        Column(
            "wasted_tokens", "int64", "tokens", "generated tokens that are not trained on: aborted, surplus or redone"
        ),
        Column("paused_tokens", "int64", "tokens", "generated tokens of responses that go on in a later step"),
        Column("resumed_tokens", "int64", "tokens", "tokens that the step's responses brought from earlier steps"),
        Column("launched", "int64", "", "responses launched"),
        Column("trained", "int64", "", "responses trained on"),
        Column("put_back", "int64", "", "prompts that were not finished and are generated again"),
        Column("resumed", "int64", "", "responses that came from an earlier step"),
        Column("paused", "int64", "", "responses that go on in a later step"),
        Column("dropped", "int64", "", "prompts dropped for their rewards"),
        Column("waiting", "int64", "", "prompts waiting at the end of the step, to go on or to be generated again"),
        Column("timeouts", "int64", "", "responses whose reward call was ended by a timeout, of those trained on"),
        Column("longest_tokens", "int64", "tokens", "longest response that was trained on"),
        Column("bubble_fraction", "float64", "", "share of GPU time within step_time_s in which the GPU did nothing"),
        Column(
            "tail_fraction",
            "float64",
            "",
            "share of the GPUs' busy time in which they decoded at less than half of the throughput that they had "
            "reached with their full batch",
        ),
        Column(
            "gen_p90_time_s",
            "float64",
            "s",
            "from the start of generation until 90% of the batch was there",
        ),
        Column(
            "gen_bound_s", "float64", "s", "no schedule generates these responses faster on these GPUs (lower bound)"
        ),
        Column(
            "initial_tp",
            "int64",
            "",
            "GPUs of a replica at the start of generation: TP, times PP where a plan pipelines",
        ),
        Column("switches", "int64", "", "changes of a node's degree during generation"),
        Column("switch_time_s", "float64", "s", "pauses of nodes for these changes, summed"),
        Column("preemptions", "int64", "", "sequences that lost their KV cache for lack of pages and were recomputed"),
        Column("released_gpu_s", "float64", "s", "GPU time that generation gave up to other calls before its end"),
        Column("kv_peak_tokens", "int64", "tokens", "most context tokens held by one replica at a time"),
        Column(
            "staleness",
            "int64",
            "steps",
            "weight updates between the oldest weights that generated a token trained on and the weights trained",
        ),
    ),
    "responses": (
        *_STEP,
        Column("response", "int64", "", "number of the response within the step, from 0"),
        Column("prompt_id", "string", "", "the trace's name of the prompt"),
        Column("position", "int64", "", "the prompt's place in training order, counted over epochs"),
        Column("prompt_tokens", "int64", "tokens", "prompt length"),
        Column("response_tokens", "int64", "tokens", "tokens generated"),
        Column("start_at", "float64", "s", "moment it was first admitted; moments count from the start of the run"),
        Column("first_token_at", "float64", "s", "moment of its first token"),
        Column("finish_at", "float64", "s", "moment of its last token; missing if it never finished"),
        Column("replica", "int64", "", "replica it ran on last; numbers run on over the switches of a step"),
        Column("tp_history", "string", "", "GPUs of the replicas it ran on (TP, times PP), in order, such as 2>8"),
        Column("preemptions", "int64", "", "times it lost its KV cache and was recomputed"),
        Column("aborted", "bool", "", "dropped unfinished"),
        Column("trained", "bool", "", "belongs to the step's batch"),
        Column("paused", "bool", "", "goes on in a later step, with its tokens"),
        Column("resumed", "bool", "", "was begun in an earlier step; start and first token may lie there"),
        Column("resumed_tokens", "int64", "tokens", "of response_tokens, those generated in earlier steps"),
        Column("staleness", "int64", "steps", "weight updates between its oldest token's weights and the step's own"),
        Column("score_start_at", "float64", "s", "moment a worker or judge was given it to score; missing if none was"),
        Column("scored_at", "float64", "s", "moment of its reward; missing if it was not scored"),
        Column("reward", "float64", "", "what it got; missing if it was not scored"),
        Column("timed_out", "bool", "", "its reward call was ended by a timeout"),
    ),
    "stays": (
        *_STEP,
        Column("call", "string", "", "call that the replica works for: generate, or a reward call with a judge"),
        Column("response", "int64", "", "number of the response within the step; of a judge, the one that it scores"),
        Column("replica", "int64", "", "replica of the call; numbers run on over the switches of a step"),
        Column("gpu", "int64", "", "its first GPU"),
        Column("gpus", "int64", "", "how many GPUs it has: TP, times PP"),
        Column("arrived_at", "float64", "s", "moment it came to the replica's queue"),
        Column("admitted_at", "float64", "s", "moment it was admitted; missing if it left the queue otherwise"),
        Column("decoding_at", "float64", "s", "moment it joined the decoding batch; missing if it left before"),
        Column("left_at", "float64", "s", "moment it left"),
        Column("start_tokens", "int64", "tokens", "its context when it was admitted (or left the queue)"),
        Column("end_tokens", "int64", "tokens", "its context when it left"),
        Column("iteration", "int64", "", "iterations with decodes that the replica had done at decoding_at, or 0"),
        Column(
            "left",
            "string",
            "",
            "why: finished, preempted (a new stay begins), migrated, switched, released, aborted, or stopped with "
            "the stage",
        ),
    ),
    "calls": (
        *_STEP,
        Column("call", "string", "", "call of the workflow"),
        Column("kind", "string", "", "generate, inference, train, reward or sync"),
        Column("model", "string", "", "model the call belongs to"),
        Column("ready_at", "float64", "s", "moment its inputs were there"),
        Column("start_at", "float64", "s", "moment it had its GPUs; the first, if it takes responses as they come"),
        Column("end_at", "float64", "s", "moment it was done"),
        Column("gpus", "int64", "", "GPUs of its placement; 0 for CPU work"),
        *CALL_PARTS,
    ),
    "switches": (
        *_STEP,
        Column("at", "float64", "s", "moment the last replica of the node had stopped"),
        Column("node", "int64", "", "node that switched"),
        Column("from_tp", "int64", "", "degree before"),
        Column("to_tp", "int64", "", "degree after"),
        Column("weights_s", "float64", "s", "resharding the weights"),
        Column("kv_s", "float64", "s", "migrating the KV cache; 0 if it is recomputed"),
        Column("graph_s", "float64", "s", "capturing decode graphs for the batch sizes of the tail"),
        Column("control_s", "float64", "s", "freeing memory, synchronising, creating communication groups"),
    ),
    "spans": (
        *_STEP,
        Column("gpu", "int64", "", "first GPU of a contiguous run of GPUs"),
        Column("gpus", "int64", "", "how many GPUs"),
        Column("start_at", "float64", "s", "begin"),
        Column("end_at", "float64", "s", "end"),
        Column("kind", "string", "", "decode, prefill, mixed, switch, or the name of a call"),
        Column("tp", "int64", "", "GPUs of the replica: TP, times PP where a plan pipelines (1 for calls)"),
        Column("label", "string", "", "replica or switch it belongs to"),
        Column("shared", "bool", "", "it ran beside other work on the same GPUs"),
    ),
}


def _ratio(name: str, of: str) -> tuple[Column, ...]:
    return (
        Column(name, "float64", "", f"{of} over the baseline's, geometric mean over seeds"),
        Column(f"{name}_low", "float64", "", "lower end of its 95% interval; missing with one seed"),
        Column(f"{name}_high", "float64", "", "upper end of its 95% interval; missing with one seed"),
    )


#: Columns of `Result.summary()`, one row per case and system; means are over the steady steps of all seeds.
SUMMARY: tuple[Column, ...] = (
    *_RUN[:2],
    Column("responses_per_s", "float64", "1/s", "responses trained on per second of step time"),
    *_ratio("speedup", "responses trained on per second"),
    *_ratio("token_speedup", "tokens trained on per second"),
    *_ratio("gen_speedup", "responses trained on per second of generation"),
    Column("trained", "float64", "", "mean number of responses that a step trains on"),
    Column("step_time_s", "float64", "s", "mean step time"),
    Column("step_time_s_half", "float64", "s", "half the 95% interval of step_time_s over seeds"),
    Column("gen_time_s", "float64", "s", "mean generation time"),
    Column("gen_time_s_half", "float64", "s", "half the 95% interval of gen_time_s over seeds"),
    Column("gen_p90_time_s", "float64", "s", "mean time until 90% of the batch was there"),
    Column(
        "gen_exposed_s", "float64", "s", "mean generation that the step waited for, its own or that of another step"
    ),
    Column("prep_time_s", "float64", "s", "mean time in which reward or log-prob calls ran and generation did not"),
    Column("train_time_s", "float64", "s", "mean time in which training ran and none of those before did"),
    Column("sync_time_s", "float64", "s", "mean time in which only new weights were on their way to other calls"),
    Column("waiting_time_s", "float64", "s", "mean time in which no call of any step ran"),
    Column("tokens_per_s", "float64", "tokens/s", "prompt and response tokens trained on per second of step time"),
    Column("response_tokens_per_s", "float64", "tokens/s", "response tokens trained on per second: no prompts"),
    Column("generated_tokens_per_s", "float64", "tokens/s", "tokens generated per second, trained on or not"),
    Column("bubble_fraction", "float64", "", "share of GPU time in which the GPU did nothing"),
    Column("tail_fraction", "float64", "", "share of busy GPU time that decodes at less than half the full throughput"),
    Column("wasted_fraction", "float64", "", "share of the generated tokens that is not trained on"),
    Column("switches", "float64", "", "changes of a node's degree per step"),
    Column("switch_time_s", "float64", "s", "pauses of nodes for these changes, per step"),
    Column("bound_share", "float64", "", "lower bound over generation time"),
    Column(
        "held_back",
        "float64",
        "",
        "prompts that wait after the last counted step, less those before the first, as a share of those trained on; "
        "beyond 5% either way throughputs cannot be compared yet",
    ),
)
