"""How large errors may be: the targets rlsim sets itself, and what holds where one is missed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Literal

from rlsim.validate.rows import Summary

Statistic = Literal["mean", "median", "p90", "bias"]


@dataclass(frozen=True)
class Bound:
    """An upper limit of a statistic of the absolute errors of one group and quantity (shell patterns); of the bias, its
    size counts.

    `missed`: the target that the limit stands in for, and why.
    """

    part: str
    group: str
    quantity: str
    statistic: Statistic
    limit: float
    missed: str = ""
    kind: str = "*"

    def holds_for(self, summary: Summary) -> bool:
        return (
            summary.part == self.part
            and fnmatch(summary.group, self.group)
            and fnmatch(summary.quantity, self.quantity)
            and fnmatch(summary.kind, self.kind)
        )


#: Figures of papers: no targets (they are predictions), but no error grows unseen: what it was, and one percent more.
_PUBLISHED: tuple[tuple[str, str, str, float], ...] = (
    ("pat", "a40-tp2", "decode_step_s at 1 per replica", 0.06),
    ("pat", "a40-tp8", "decode_step_s at 1 per replica", 0.02),
    ("pat", "a40-tp2", "decode_step_s at 32 per replica", 0.04),
    ("pat", "a40-tp8", "decode_step_s at 128 per replica", 0.02),
    ("pat", "a40-switch-tp2-tp8", "weights_s", 0.02),
    ("pat", "a40-switch-tp2-tp8", "kv_s", 0.02),
    ("pat", "a40-switch-tp2-tp8", "graph_s", 0.08),
    ("pat", "a40-switch-tp2-tp8", "total_s", 0.02),
    ("pat", "h100-24k-verl", "gen_time_s", 0.04),
    ("pat", "h100-24k", "gen_time_s", 0.06),
    ("pat", "h100-24k-verl", "step_time_s", 0.11),
    ("pat", "h100-24k-verl", "step_minus_gen_s", 0.51),
    ("pat", "h100-24k-verl", "generated tokens", 0.16),
    ("pat", "h100-24k-verl", "generated_tokens_per_s", 0.29),
    ("pat", "a40-6k-verl", "generation share", 0.1),
    ("pat", "a40-6k", "speedup", 0.09),
    ("pat", "a40-16k-verl", "generation share", 0.02),
    ("pat", "a40-16k", "speedup", 0.14),
    ("pat", "h100-24k-vllm-verl", "gen_time_s", 0.09),
    ("pat", "h100-24k-vllm", "gen_time_s", 0.19),
    ("pat", "h100-24k-vllm", "gen_speedup", 0.09),
    ("pat", "h100-24k-vllm-verl", "step_time_s", 0.07),
    ("pat", "h100-24k-vllm", "step_time_s", 0.06),
    ("pat", "h100-24k-vllm", "speedup", 0.03),
    ("pat", "h100-24k-vllm-verl", "step_minus_gen_s", 0.59),
    ("pat", "h100-24k-vllm-verl", "generated tokens", 0.16),
    ("pat", "h100-24k-vllm-verl", "generated_tokens_per_s", 0.24),
    ("pat", "a40-6k-vllm-verl", "generation share", 0.11),
    ("pat", "a40-6k-vllm", "speedup", 0.08),
    ("pat", "a40-16k-vllm-verl", "generation share", 0.02),
    ("pat", "a40-16k-vllm", "speedup", 0.13),
    ("pat", "a40-aligned", "decode TFLOP/s per GPU", 0.29),
    ("pat", "a40-tail-end", "decode TFLOP/s per GPU", 0.53),
    ("pat", "a40-switch-layer-wise", "extra peak bytes", 0.13),
    ("pat", "a40-switch-full-move", "extra peak bytes", 0.05),
    ("rollpacker", "trace-*", "*", 0.05),
    ("rollpacker", "14b-*", "* share", 0.11),
    ("rollpacker", "7b-rounds", "short rounds *", 0.01),
    ("rollpacker", "32b-rounds", "short rounds *", 0.01),
    ("rollpacker", "7b-rounds", "longest *", 0.15),
    ("rollpacker", "32b-rounds", "longest *", 2.54),
    ("rollpacker", "eta", "best eta", 0.01),
    ("rollpacker", "eta", "*prompts only*", 0.16),
    ("rollpacker", "eta", "*responses only*", 0.39),
    ("rollpacker", "preemptions", "short / long rounds", 0.02),
    ("rollpacker", "preemptions", "TP2 / TP1*", 0.25),
    ("rollpacker", "preemptions", "time*", 0.46),
    ("rollpacker", "adaptive-timeout", "*", 0.23),
    ("rollpacker", "stream-*", "*", 0.14),
    ("rollpacker", "judge", "*", 0.11),
    ("oppo", "intra-step", "speedup", 0.09),
    ("oppo", "trl", "GPUs busy *", 0.15),
    ("oppo", "oppo", "GPUs busy *", 0.32),
    ("oppo", "chunk-size", "*", 0.01),
    ("real", "*", "iteration_s, with outside", 0.05),
    ("real", "*", "iteration_s, scheduled", 0.12),
    ("real", "published-plan", "train_*", 0.12),
    ("real", "published-plan", "*_s", 0.25),
    ("real", "published-plan", "over the heuristic", 0.46),
    ("real", "heuristic", "*_s", 0.53),
    ("real", "weak-scaling", "*", 0.21),
    ("steps", "nemo-rl", "step_time_s", 0.12),
    ("steps", "verl", "step_time_s", 0.2),
    ("steps", "verl", "[!g]*_s", 0.3),
)

#: Why errors of published figures grew when left-out errors were brought down; before the colon, what they were.
_SGLANG = "%: SGLang's serving runs show no host time (it was 15 us a sequence), so TP8 is faster here than PAT's was"
_VLLM = "%: the static baseline generates as fast as before, PAT with vLLM 0.24's kernels at TP8 faster"
_STACK = "%: training's share of the peak is fitted to NeMo-RL's and veRL's runs, whose steps it predicts"
_JUDGE = "%: vLLM's fit has no floor for each prefill iteration any more, so a judge's short ones take less"
_KERNELS = "%: generation with vLLM 0.24's kernels and the host time that is fitted with them"
_REAL = "%: calls that were too fast got faster: decoding without host time, inference and training at 0.49 of the peak"
_MIXED_GAIN = "15%: Qwen3-30B trains too fast one step off policy, Qwen3-235B generates too fast on policy"
_V1_GAIN = "20%: vLLM's host time per sequence, which decides full replicas, is fitted to another model and release"
_SHARED = "30%: responses share their prompts' prefill and KV pages now (+2.7 points), and H20 has blocks of few rows"
_HEADS = "%: critics and reward models had a vocabulary's head by mistake, theirs gives one number a token"

#: Why RollPacker's largest speedups are beyond their target.
_LARGER_TP = "20% (was 33%): larger TPs than the published 2 are faster here, most so with vLLM 0.24's kernels at TP8"
_STREAM = "20% (was 52%; 68% without prefix caching): the planner, as above, and streamed training costs nothing else"
_UNFITTED = "20% (was 44%, 54%; 71% without prefix caching): the planner, as above, and the training stack is open"

#: Why TensorRT-LLM's errors on a TP that no fit has seen are beyond their targets.
_HOST = "10%: TP1 and TP4 are bound by the GPU, so they say little about TP8's host time"
_WAITS = "20%: where users wait under load changes from run to run"

#: The first that matches counts, for each statistic.
BOUNDS: tuple[Bound, ...] = (
    # Kernels on Hopper: median 5%, 90th percentile 15%.
    Bound("kernels", "h[12]00-*-trtllm", "decode_attention_s", "p90", 0.175, "15%: rows served from L2 in part"),
    Bound("kernels", "h[12]00-*-trtllm", "decode_attention_s", "median", 0.055, "5%: rows served from L2 in part"),
    Bound("kernels", "h[12]00-*", "custom_all_reduce_s", "p90", 0.235, "15%: jumps between algorithms"),
    Bound("kernels", "h[12]00-*", "custom_all_reduce_s", "median", 0.06, "5%: jumps between algorithms"),
    Bound(
        "kernels", "h200-sxm-sglang", "gemm_s", "median", 0.055, "5%: vLLM's table of the same product differs by 5%"
    ),
    Bound("kernels", "h200-sxm-sglang", "gemm_s", "p90", 0.16, "15%: vLLM's table of the same product differs by 21%"),
    Bound("kernels", "h[12]00-*", "*", "median", 0.05),
    Bound("kernels", "h[12]00-*", "*", "p90", 0.15),
    Bound("kernels", "b200-*", "*_attention_s", "median", 0.05),
    Bound("kernels", "b200-*", "*_attention_s", "p90", 0.15),
    # Elsewhere there is no target; errors must not grow.
    Bound("kernels", "l40s-vllm", "gemm_s", "median", 0.07, "6.5%: vLLM 0.24's table is coarser than 0.14's"),
    Bound("kernels", "*", "*", "median", 0.065),
    Bound("kernels", "*", "*", "p90", 0.26),
    # Measured steps of real runs.
    Bound("steps", "realhf", "step_time_s", "mean", 0.15),
    # Asynchronous trainers: the gain of one step off within 15%, of full asynchrony 20%; steps within 25%.
    Bound("asynchronous", "*/one-step-off-*", "gain", "mean", 0.15),
    Bound("asynchronous", "verl-v1/*", "gain", "mean", 0.36, _V1_GAIN),
    Bound("asynchronous", "*", "gain", "mean", 0.20),
    Bound("asynchronous", "*", "*", "mean", 0.25),
    Bound("steps", "nemo-rl", "gain", "mean", 0.15),
    Bound("steps", "nemo-rl-gb200", "tokens_per_s_gpu", "mean", 0.15),
    Bound("steps", "nemo-rl-moe", "gain", "mean", 0.21, _MIXED_GAIN),
    Bound("steps", "nemo-rl-moe", "step_time_s", "mean", 0.14),
    Bound("steps", "verl", "generate_s", "mean", 0.34, _SHARED),
    Bound("steps", "megatron-moe", "iteration_s", "mean", 0.10),
    # Whole engines on a TP that no fit has seen: TPOT 6% for an engine, its bias 3%, 10% for a TP; TTFT 20%.
    Bound("transfer", "trtllm/*/tp8", "tpot_s", "mean", 0.115, _HOST, "left-out"),
    Bound("transfer", "trtllm/*/tp4", "ttft_s", "mean", 0.39, _WAITS, "left-out"),
    Bound("transfer", "trtllm/*/tp8", "ttft_s", "mean", 0.29, _WAITS, "left-out"),
    Bound("transfer", "vllm/*/tp2", "ttft_s", "mean", 0.255, "20%: how requests bunch is not known", "left-out"),
    Bound("transfer", "*/*/*", "tpot_s", "mean", 0.10, kind="left-out"),
    Bound("transfer", "trtllm", "tpot_s", "mean", 0.095, _HOST.replace("10%", "6%"), "left-out"),
    Bound("transfer", "trtllm", "tpot_s", "bias", 0.06, _HOST.replace("10%", "3%"), "left-out"),
    Bound("transfer", "trtllm", "ttft_s", "mean", 0.28, _WAITS, "left-out"),
    Bound("transfer", "vllm", "tpot_s", "bias", 0.03, kind="left-out"),
    Bound("transfer", "sglang", "tpot_s", "bias", 0.03, kind="left-out"),
    Bound("transfer", "*", "tpot_s", "mean", 0.06, kind="left-out"),
    Bound("transfer", "*", "ttft_s", "mean", 0.20, kind="left-out"),
    # Real rollouts, calibrated at other shapes than those run.
    Bound("rollout", "*", "makespan_s", "mean", 0.07),
    Bound("rollout", "*", "step_median_error", "mean", 0.10),
    Bound("rollout", "*", "throughput_mean_error", "mean", 0.05),
    # Weight syncs that no constant was fitted to.
    Bound("weight_sync", "*", "sync_s", "mean", 0.30, kind="output"),
    Bound("rollpacker", "32b-planner", "speedup", "mean", 0.46, _LARGER_TP),
    Bound("rollpacker", "32b-rollpacker", "speedup", "mean", 0.75, _STREAM),
    Bound("rollpacker", "7b-over-rlhfuse-plus", "speedup", "mean", 0.28, "20%: what was strengthened is open"),
    Bound("rollpacker", "32b-planner-unfitted", "speedup", "mean", 0.64, _UNFITTED),
    Bound("rollpacker", "32b-rollpacker-unfitted", "speedup", "mean", 0.78, _UNFITTED),
    Bound("rollpacker", "32b-*-unfitted", "speedup", "mean", 0.27, "20%: the training stack is open"),
    Bound("rollpacker", "*b-*", "speedup", "mean", 0.20),
    Bound("pat", "h100-24k", "gen_speedup", "mean", 0.09, "2" + _SGLANG),
    Bound("pat", "h100-24k", "step_time_s", "mean", 0.20, "16" + _SGLANG),
    Bound("pat", "h100-24k", "speedup", "mean", 0.13, "7" + _SGLANG),
    Bound("pat", "h100-24k", "generated_tokens_per_s", "mean", 0.42, "36" + _SGLANG),
    Bound("pat", "h100-24k-vllm", "generated_tokens_per_s", "mean", 0.22, "10" + _VLLM),
    Bound("rollpacker", "14b-judge", "reward share", "mean", 0.42, "33" + _JUDGE),
    Bound("rollpacker", "stream-trigger0.2", "*", "mean", 0.15, "14" + _KERNELS),
    Bound("oppo", "inter-step", "speedup", "mean", 0.40, "36" + _STACK + "; 37" + _HEADS),
    Bound("oppo", "oppo", "speedup", "mean", 0.46, "45" + _HEADS),
    Bound("oppo", "intra-step", "share *", "mean", 0.48, "42" + _STACK + "; 43" + _HEADS),
    Bound("real", "published-plan", "generate_s", "mean", 0.51, "47" + _REAL),
    Bound("real", "published-plan", "ref_log_prob_s", "mean", 0.34, "25" + _STACK),
    Bound("real", "published-plan", "values_s", "mean", 0.51, "25" + _STACK + "; 42" + _HEADS),
    Bound("real", "published-plan", "iteration_s", "mean", 0.29, "25" + _REAL),
    Bound("real", "heuristic", "generate_s", "mean", 0.82, "74" + _REAL),
    Bound("real", "heuristic", "iteration_s", "mean", 0.61, "53" + _REAL),
    *(Bound(part, case, quantity, "mean", limit) for part, case, quantity, limit in _PUBLISHED),
)


def checked(
    summaries: Iterable[Summary], bounds: Iterable[Bound] = BOUNDS
) -> Iterator[tuple[Summary, Bound, float, bool]]:
    """Every summary with each of its bounds, the statistic's value, and whether it is within."""
    known = tuple(bounds)
    for summary in summaries:
        seen: set[Statistic] = set()
        for bound in known:
            if bound.statistic not in seen and bound.holds_for(summary):
                seen.add(bound.statistic)
                value = abs(float(getattr(summary, bound.statistic)))
                yield summary, bound, value, value <= bound.limit
