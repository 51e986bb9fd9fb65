"""Every column of every result table: name, type, unit, meaning. Feeds the tables, their metadata and the docs."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple


class Column(NamedTuple):
    """One column of a result table."""

    name: str
    dtype: str  # as pandas names it
    unit: str
    meaning: str


def _column(dtype: str, unit: str, name: str, meaning: str) -> Column:
    return Column(name, dtype, unit, meaning)


_text, _flag = partial(_column, "string", ""), partial(_column, "bool", "")
_count, _tokens = partial(_column, "int64", ""), partial(_column, "int64", "tokens")
_figure, _seconds = partial(_column, "float64", ""), partial(_column, "float64", "s")
_updates = partial(_column, "float64", "updates")

_NOT_APART = "missing where generation and training share GPUs"

_RUN = (
    _text("case", "name of the case in the experiment; empty if it has none"),
    _text("system", "name of the system in the experiment, variants suffixed"),
    _count("seed", "seed of the run; systems with the same case and seed see the same responses"),
)
_STEP = (*_RUN, _count("step", "training step, from 0"))

#: What a call's time goes to; the parts of a call add up to its time on its GPUs.
CALL_PARTS = (
    _seconds("compute_s", "computation, mean over data-parallel ranks"),
    _seconds("communication_s", "communication that computation does not hide"),
    _seconds("bubble_s", "pipeline fill and drain"),
    _seconds("optimizer_s", "optimizer update"),
    _seconds("offload_s", "copies to and from host memory"),
    _seconds("imbalance_s", "waiting for the slowest data-parallel rank"),
    _seconds("weights_s", "weights on their way to the calls that a sync serves"),
    _seconds("data_s", "inputs on their way from the GPUs of the calls before"),
)

TABLES: dict[str, tuple[Column, ...]] = {
    "steps": (
        *_STEP,
        _seconds("step_time_s", "from the end of the step before to the end of the last call of this one"),
        _flag("steady", "counts in means: in whole periods, after the run has filled and before it drains"),
        _flag("filled", "what was begun in the first step has been trained on or dropped (99% of its tokens)"),
        _text("round", "kind of round, as the batching calls it; empty if there is one kind"),
        _seconds("gen_time_s", "generation, from the first request to the last response"),
        _seconds("gen_exposed_s", "generation that the trainer waited for, or that held its GPUs"),
        _seconds("prep_time_s", "log-probs on the trainer's GPUs, and log-probs and rewards that it waited for"),
        _seconds("train_time_s", "training"),
        _seconds("sync_time_s", "new weights on their way, with no training or log-probs on the trainer's GPUs"),
        _seconds("waiting_time_s", "the trainer waited and no call of any step ran: the rest of step_time_s"),
        _seconds("reward_time_s", "reward calls, from their first response to the last score"),
        _tokens("tokens", "prompt and response tokens that were trained on"),
        _tokens("trained_response_tokens", "of `tokens`, those of responses: prompts are not in it"),
        _tokens("response_tokens", "tokens generated in the step, wasted ones included"),
        _tokens("wasted_tokens", "generated tokens that are not trained on: aborted, surplus or redone"),
        _tokens("paused_tokens", "generated tokens of responses that go on in a later step"),
        _tokens("baseline_tokens", "generated tokens of responses that others are compared with (ReMax): scored only"),
        _tokens("resumed_tokens", "tokens that the step's responses brought from earlier steps"),
        _count("launched", "responses launched"),
        _count("trained", "responses trained on"),
        _count("put_back", "prompts that were not finished and are generated again"),
        _count("resumed", "responses that came from an earlier step"),
        _count("paused", "responses that go on in a later step"),
        _count("dropped", "prompts dropped: for their rewards, as too stale, or with an aborted response"),
        _count("dropped_stale", "of these, as too stale"),
        _count("waiting", "prompts that wait at the end: to go on, to begin again, or complete for a later step"),
        _tokens("outstanding_tokens", "of prompts begun and not yet trained on or dropped at the end, at full length"),
        _tokens("dropped_tokens", "of prompts dropped as too stale, at full length"),
        _count("timeouts", "responses whose reward call was ended by a timeout, of those trained on"),
        _tokens("longest_tokens", "longest response that was trained on"),
        _figure("bubble_fraction", "share of GPU time within step_time_s in which the GPU did nothing"),
        _figure(
            "tail_fraction",
            "share of the GPUs' busy time in which they decoded at less than half of the throughput that they had "
            "reached with their full batch",
        ),
        _seconds("gen_p90_time_s", "from the start of generation until 90% of the batch was there"),
        _seconds("gen_bound_s", "no schedule generates these responses faster on these GPUs (lower bound)"),
        _count(
            "initial_tp",
            "GPUs of a replica at the start of generation: TP, times the pipeline stages of a plan or of `engine.pp`",
        ),
        _count("switches", "changes of a node's degree during generation"),
        _seconds("switch_time_s", "pauses of nodes for these changes, summed"),
        _count("moved", "responses that a rollout control moved from one replica to another"),
        _count("released", "replicas that a rollout control gave up before the end of generation"),
        _count("preemptions", "sequences that lost their KV cache for lack of pages and were recomputed"),
        _tokens("prefix_hit_tokens", "context tokens that prefills found in the prefix cache, and did not compute"),
        _tokens("kv_loaded_tokens", "context tokens whose KV was loaded from host memory; they count as found, too"),
        _seconds("released_gpu_s", "GPU time that generation gave up to other calls before its end"),
        _seconds("borrowed_gpu_s", "GPU time that generation had on GPUs of training, from one batch to the next"),
        _tokens("kv_peak_tokens", "most context tokens held by one replica at a time, until the step has its batch"),
        _figure("rollout_idle", f"share of step_time_s in which no GPU of generation did anything; {_NOT_APART}"),
        _figure("trainer_idle", f"the same of the GPUs of the train calls; {_NOT_APART}"),
        _updates(
            "staleness_mean",
            "weight updates between the oldest weights that generated any token of a response trained on and the "
            "weights trained: mean over these responses",
        ),
        _updates("staleness_p95", "the same: 95% of the responses trained on are at most so stale"),
        Column("staleness_max", "int64", "updates", "the same of the stalest response trained on"),
        _text("staleness_counts", "how many responses trained on have which staleness, as in 0:96 1:32"),
        _figure(
            "stale_token_share",
            "share of the response tokens trained on that weights older than those trained have generated",
        ),
    ),
    "responses": (
        *_STEP,
        _count("response", "number of the response within the step, from 0"),
        _text("prompt_id", "the trace's name of the prompt"),
        _count("position", "the prompt's place in training order, counted over epochs"),
        _tokens("prompt_tokens", "prompt length"),
        _tokens("response_tokens", "tokens generated"),
        _seconds("start_at", "moment it was first admitted; moments count from the start of the run"),
        _seconds("first_token_at", "moment of its first token"),
        _seconds("finish_at", "moment of its last token; missing if it never finished"),
        _count("replica", "replica it ran on last; numbers run on over the switches of a step"),
        _text("tp_history", "GPUs of the replicas it ran on (TP, times PP), in order, such as 2>8"),
        _count("preemptions", "times it lost its KV cache and was recomputed"),
        _flag("aborted", "dropped unfinished"),
        _flag("trained", "belongs to the step's batch"),
        _flag("baseline", "scored to compare those trained on with (ReMax)"),
        _flag("paused", "goes on in a later step, with its tokens"),
        _flag("resumed", "was begun in an earlier step; start and first token may lie there"),
        _tokens("resumed_tokens", "of response_tokens, those generated in earlier steps"),
        Column("staleness", "int64", "updates", "weight updates between its oldest token's weights and those trained"),
        _tokens("stale_tokens", "of response_tokens, those generated by weights older than those trained"),
        _seconds("score_start_at", "moment a worker or judge was given it to score; missing if none was"),
        _seconds("scored_at", "moment of its reward; missing if it was not scored"),
        _figure("reward", "what it got; missing if it was not scored"),
        _flag("timed_out", "its reward call was ended by a timeout"),
    ),
    "stays": (
        *_STEP,
        _text("call", "call that the replica works for: generate, or a reward call with a judge"),
        _count("response", "number of the response within the step; of a judge, the one that it scores"),
        _count("replica", "replica of the call; numbers run on over the switches of a step"),
        _count("gpu", "its first GPU"),
        _count("gpus", "how many GPUs it has: TP, times PP"),
        _seconds("arrived_at", "moment it came to the replica's queue"),
        _seconds("admitted_at", "moment it was admitted; missing if it left the queue otherwise"),
        _seconds("decoding_at", "moment it joined the decoding batch; missing if it left before"),
        _seconds("left_at", "moment it left"),
        _tokens("start_tokens", "its context when it was admitted (or left the queue)"),
        _tokens("end_tokens", "its context when it left"),
        _count("iteration", "iterations with decodes that the replica had done at decoding_at, or 0"),
        _text(
            "left",
            "why: finished, preempted (a new stay begins), migrated, switched, released, aborted, stopped with the "
            "stage, or paused as its budget was used up",
        ),
    ),
    "calls": (
        *_STEP,
        _text("call", "call of the workflow"),
        _text("kind", "generate, inference, train, reward or sync"),
        _text("model", "model the call belongs to"),
        _seconds("ready_at", "moment its inputs were there"),
        _seconds("start_at", "moment it had its GPUs; the first, if it takes responses as they come"),
        _seconds("end_at", "moment it was done"),
        _count("gpus", "GPUs of its placement; 0 for CPU work"),
        *CALL_PARTS,
    ),
    "switches": (
        *_STEP,
        _seconds("at", "moment the last replica of the node had stopped"),
        _count("node", "node that switched"),
        _count("from_tp", "degree before"),
        _count("to_tp", "degree after"),
        _seconds("weights_s", "resharding the weights"),
        _seconds("kv_s", "migrating the KV cache; 0 if it is recomputed"),
        _seconds("graph_s", "capturing decode graphs for the batch sizes of the tail"),
        _seconds("control_s", "freeing memory, synchronising, creating communication groups"),
    ),
    "spans": (
        *_STEP,
        _count("gpu", "first GPU of a contiguous run of GPUs"),
        _count("gpus", "how many GPUs"),
        _seconds("start_at", "begin"),
        _seconds("end_at", "end"),
        _text("kind", "decode, prefill, mixed, switch, or the name of a call"),
        _count("tp", "GPUs of the replica: TP, times PP where a plan pipelines (1 for calls)"),
        _text("label", "replica or switch it belongs to"),
        _flag("shared", "it ran beside other work on the same GPUs"),
    ),
}


def _ratio(name: str, of: str) -> tuple[Column, ...]:
    return (
        _figure(name, f"{of} over the baseline's, geometric mean over seeds"),
        _figure(f"{name}_low", "lower end of its 95% interval; missing with one seed"),
        _figure(f"{name}_high", "upper end of its 95% interval; missing with one seed"),
    )


def _as_in_steps(*names: str) -> list[Column]:
    return [next(column for column in TABLES["steps"] if column.name == name) for name in names]


#: What rollout controls did: changes of degree, responses moved, replicas given up.
ACTED = ("switches", "moved", "released")
#: Columns of `Result.summary()`, one row per case and system; means are over the steady steps of all seeds.
SUMMARY: tuple[Column, ...] = (
    *_RUN[:2],
    Column("responses_per_s", "float64", "1/s", "responses trained on per second of step time"),
    *_ratio("speedup", "responses trained on per second"),
    _figure("speedup_model_low", "lower end of its 95% interval over the calibration's errors; missing without draws"),
    _figure("speedup_model_high", "upper end of the same"),
    *_ratio("token_speedup", "tokens trained on per second"),
    *_ratio("gen_speedup", "responses trained on per second of generation"),
    _figure("trained", "mean number of responses that a step trains on"),
    *_as_in_steps("staleness_mean", "staleness_p95", "staleness_max", "stale_token_share", "step_time_s"),
    _seconds("step_time_s_half", "half the 95% interval of step_time_s over seeds"),
    *_as_in_steps("gen_time_s"),
    _seconds("gen_time_s_half", "half the 95% interval of gen_time_s over seeds"),
    *_as_in_steps("gen_p90_time_s", "gen_exposed_s", "prep_time_s", "train_time_s", "sync_time_s", "waiting_time_s"),
    Column("tokens_per_s", "float64", "tokens/s", "prompt and response tokens trained on per second of step time"),
    Column("response_tokens_per_s", "float64", "tokens/s", "response tokens trained on per second: no prompts"),
    Column("generated_tokens_per_s", "float64", "tokens/s", "tokens generated per second, trained on or not"),
    *_as_in_steps("bubble_fraction", "tail_fraction", "rollout_idle", "trainer_idle"),
    _figure("wasted_fraction", "share of the generated tokens that is not trained on"),
    _figure("switches", "changes of a node's degree per step"),
    _figure("moved", "responses that a rollout control moved to another replica, per step"),
    _figure("released", "replicas that a rollout control gave up, per step"),
    _seconds("switch_time_s", "pauses of nodes for these changes, per step"),
    _figure("bound_share", "lower bound over generation time"),
    _figure(
        "held_back",
        "growth of outstanding_tokens over the counted steps as a share of the tokens trained on, larger by the share "
        "of dropped_tokens",
    ),
    _text("unsteady", "why the throughput would not last, so that it is not compared; empty if it would"),
)
