"""Faults that must not go unnoticed: what a wrong simulator would most plausibly have wrong.

A topic is noticed if each of its faults is. `old` stands exactly once in the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    """One change of the text of a file."""

    topic: str
    what: str
    path: str
    old: str
    new: str

    def code(self, root: Path) -> tuple[str, int]:
        """The file with the fault in it, and the line where it begins; `ValueError` unless `old` is there just once."""
        text = (root / self.path).read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.path}: {self.old!r} ({self.topic}) stands there {text.count(self.old)} times, not 1"
            )
        return text.replace(self.old, self.new), text[: text.index(self.old)].count("\n") + 1


_SIM, _COST = "rlsim/sim/", "rlsim/cost/"

FAULTS = (
    Fault("switch pricing", "no fixed part", _COST + "rollout.py", "runtime.switch_control_s + (", "("),
    Fault(
        "switch pricing",
        "KV by the smaller TP",
        _COST + "rollout.py",
        "max(from_tp, to_tp) / gpus",
        "min(from_tp, to_tp) / gpus",
    ),
    Fault(
        "switch pricing",
        "groups made anew but the first time",
        _COST + "rollout.py",
        "if first_use else 0.0",
        "if not first_use else 0.0",
    ),
    Fault("KV transfer", "across nodes as inside", _COST + "rollout.py", "2, 1 if same_node else 2)", "2, 1)"),
    Fault(
        "KV transfer",
        "inside a node by the larger TP",
        _COST + "rollout.py",
        "_stage_tp(min(from_tp, to_tp))",
        "_stage_tp(max(from_tp, to_tp))",
    ),
    Fault(
        "optimizer bytes",
        "gradients not clipped",
        _COST + "train.py",
        "OPTIMIZER_BYTES = 42.0",
        "OPTIMIZER_BYTES = 30.0",
    ),
    Fault(
        "elementwise bytes",
        "training: additions left out",
        _COST + "train.py",
        "around = 3 * layer.blocks + 2 * layer.norms",
        "around = 2 * layer.norms",
    ),
    Fault(
        "elementwise bytes",
        "decoding: activation reads one input",
        _COST + "roofline.py",
        "move((layer.mlp.projections + 1) * (activated",
        "move(layer.mlp.projections * (activated",
    ),
    Fault(
        "call times",
        "training: prompts left out",
        "rlsim/experiment/times.py",
        "np.fromiter((r.prompt_tokens + r.generated for r in samples)",
        "np.fromiter((r.generated for r in samples)",
    ),
    Fault(
        "call times",
        "inference: priced as training",
        _COST + "train.py",
        "time = self._mini_batch(micro[0], self._passes(backward=False))",
        "time = self._mini_batch(micro[0], self._passes(backward=True))",
    ),
    Fault("call times", "training: one epoch", _COST + "train.py", "return total * epochs + ", "return total + "),
    Fault(
        "call times",
        "sync: weights read, not written",
        _COST + "transfer.py",
        "copy_s = 2 * rollout_weight_bytes",
        "copy_s = rollout_weight_bytes",
    ),
    Fault(
        "generation's layout",
        "all replicas on the first GPUs",
        _SIM + "rollout.py",
        "self._start(node, gpus[first : first + tp], version)",
        "self._start(node, gpus[:tp], version)",
    ),
    Fault(
        "generation's layout",
        "a new plan costs nothing",
        _SIM + "generation.py",
        "if last_tp != self._tp and (planned or",
        "if last_tp != self._tp and (",
    ),
    Fault(
        "eviction order",
        "oldest first",
        _SIM + "scheduler.py",
        "order, request = self._admitted.pop()",
        "order, request = self._admitted.pop(0)",
    ),
    Fault(
        "watermark",
        "none",
        _SIM + "scheduler.py",
        "free - watermark if batch.size",
        "free if batch.size",
    ),
    Fault(
        "page rounding",
        "down on admission",
        _SIM + "scheduler.py",
        "pages = -(-context // page) if plain",
        "pages = context // page if plain",
    ),
    Fault("prefill budget", "not used up", _SIM + "scheduler.py", "left -= needed", "left -= 0"),
    Fault(
        "prefill budget",
        "decodes take nothing of it",
        _SIM + "scheduler.py",
        "budget = max(budget - self._batch.size, 1)",
        "budget = max(budget, 1)",
    ),
    Fault(
        "padding skew",
        "of all tokens",
        _SIM + "batch.py",
        "skew * (self.size * (self.step - least) - self.tokens)",
        "skew * (self.size * (self.step - least))",
    ),
    Fault(
        "padding skew",
        "of the shortest in a drain",
        _SIM + "batch.py",
        "for *_, request in reversed(left)), max)",
        "for *_, request in reversed(left)), min)",
    ),
    Fault(
        "RunningBatch to the end",
        "a drain forgets one in its tokens",
        _SIM + "batch.py",
        "tokens += (finish - step) * size",
        "tokens += (finish - step) * (size - 1)",
    ),
    Fault(
        "RunningBatch to the end",
        "fits without last pages",
        _SIM + "batch.py",
        "return self.plain and tokens + self.size * self._padding <=",
        "return self.plain and tokens <=",
    ),
    Fault(
        "GpuPool order",
        "last come first served",
        _SIM + "pool.py",
        "insort(self._queues[gpu], call, key=_rank)",
        "self._queues[gpu].insert(0, call)",
    ),
    Fault(
        "GpuPool order",
        "calls that wait side by side",
        _SIM + "pool.py",
        "for rank in sorted(firsts):",
        "for rank in sorted(firsts)[:1]:",
    ),
    Fault(
        "ElasticCall's choice",
        "not the longest idle",
        _SIM + "elastic.py",
        "if idle and self._coming < len(self._queue):\n            idle.popleft()",
        "if idle and self._coming < len(self._queue):\n            idle.pop()",
    ),
    Fault(
        "room of a layout",
        "of responses that are over",
        _SIM + "rollout.py",
        "if self._longest is None or self._longest.finished or self._longest.aborted:",
        "if self._longest is None:",
    ),
    Fault(
        "weight-sync priority",
        "none",
        _SIM + "pool.py",
        'if kind == "sync" and self._generations:',
        'if kind == "train" and self._generations:',
    ),
    Fault(
        "lag bound and staleness",
        "an exact lag one later",
        _SIM + "run.py",
        "min(step + edge.lag - 1, self.what.steps - 1)",
        "min(step + edge.lag, self.what.steps - 1)",
    ),
    Fault(
        "lag bound and staleness",
        "results one step staler",
        _SIM + "run.py",
        "yield self.done[edge.source, step - edge.lag]",
        "yield self.done[edge.source, max(step - edge.lag - 1, 0)]",
    ),
    Fault(
        "lag bound and staleness",
        "of the last pause, not the oldest token",
        _SIM + "request.py",
        "return (*self.runs, Run(version, own)) if own else self.runs",
        "return (Run(version, self.generated),) if own else self.runs",
    ),
    Fault(
        "rewards and judges",
        "a response that timed out has its reward",
        _SIM + "reward.py",
        "0.0 if request.timed_out else job.reward",
        "job.reward",
    ),
    Fault(
        "rewards and judges",
        "a judge's weights come in no time",
        _SIM + "run.py",
        "judge_ready_at = self.env.now + judge.load_s",
        "judge_ready_at = self.env.now",
    ),
    Fault(
        "sampling",
        "once, not for each sequence",
        _COST + "pipeline.py",
        "model.vocab_size * math.ceil(rows / layout.attention_dp)",
        "model.vocab_size",
    ),
    Fault(
        "sampling",
        "no kernel time",
        _COST + "roofline.py",
        "more_s=sequence_s * math.ceil(n / layout.attention_dp)",
        "more_s=0.0",
    ),
    Fault(
        "host time",
        "one process for all groups of GPUs",
        _COST + "derived.py",
        "math.ceil(sequences / self.groups)",
        "sequences",
    ),
    Fault(
        "experts",
        "correction at rows over experts",
        _COST + "experts.py",
        "load.rows / load.hit, width",
        "load.rows / load.experts, width",
    ),
    Fault(
        "offloading",
        "for each epoch",
        _COST + "train.py",
        "total * epochs + TrainTime(offload_s=self._offload_s(backward=True))",
        "(total + TrainTime(offload_s=self._offload_s(backward=True))) * epochs",
    ),
    Fault(
        "OPPO",
        "chunk sizes by the time of a step",
        "rlsim/policies/oppo.py",
        "report.stage_time_s / max(report.response_tokens, 1)",
        "report.stage_time_s",
    ),
    Fault("Laminar", "rooms of more than is left", "rlsim/policies/laminar.py", "min(each, left)", "each"),
    Fault(
        "Laminar",
        "repack of replicas that are not ending",
        "rlsim/policies/laminar.py",
        "used[r.index] < self._seen[r.index][1] and all(",
        "all(",
    ),
    Fault(
        "Laminar",
        "repack of what waits",
        "rlsim/policies/laminar.py",
        " and all(one.has_kv for one in r.requests)",
        "",
    ),
    Fault(
        "timer",
        "at finishes alone",
        _SIM + "rollout.py",
        "        self._ticks = False\n        self._ask_at_end(due)",
        "        self._ticks = False",
    ),
    Fault(
        "popularity of experts",
        "a jump at an exponent of 0",
        _COST + "experts.py",
        "POPULARITY_SPAN ** min(exponent, 1.0)",
        "POPULARITY_SPAN",
    ),
    Fault(
        "collectives",
        "latency of one hop",
        _COST + "collectives.py",
        "log2(nodes) * (link.latency_s + fit.tree_hop_s)",
        "(link.latency_s + fit.tree_hop_s)",
    ),
    Fault(
        "collectives",
        "an all-reduce of one way",
        _COST + "collectives.py",
        "if nodes == 2 else 2.0 * ring",
        "if nodes == 2 else ring",
    ),
    Fault(
        "training's bubble and gradients",
        "one bubble too many",
        _COST + "train.py",
        "bubbles = (strategy.pp - 1) * work",
        "bubbles = strategy.pp * work",
    ),
    Fault(
        "training's bubble and gradients",
        "all-reduced in bf16",
        _COST + "train.py",
        'groups.time_s("all_reduce", local * strategy.gradient_bytes, "shards")',
        'groups.time_s("all_reduce", local * BF16, "shards")',
    ),
    Fault(
        "GPUs that are borrowed",
        "while training changes the weights",
        _SIM + "borrowing.py",
        "if self._since or self.trained > self._version() or not",
        "if self._since or not",
    ),
    Fault(
        "GPUs that are borrowed",
        "KV cache goes along when they go back",
        _SIM + "rollout.py",
        "            self._deal_to_active([*running, *others])\n",
        "            self._deal_to_active([*running, *others])\n"
        "            for request in running:\n"
        "                request.has_kv = True\n",
    ),
    Fault(
        "memory refusal",
        "training beside others",
        _COST + "ledger.py",
        "if gpu in row.gpus and row.start <= at <= row.end]",
        "if gpu in row.gpus and row.start == at <= row.end]",
    ),
    Fault(
        "memory refusal",
        "rollout without room for a response",
        _COST + "memory.py",
        "if not shape.fits(min_tokens, page_tokens, pages):",
        "if pages < 1:",
    ),
)
