"""Part `published`: every figure of SYSTEMS whose system exists, inputs and outputs marked."""

from __future__ import annotations

from collections.abc import Iterable

from rlsim.validate import oppo, pat, real, rollpacker
from rlsim.validate.charts import errors_chart
from rlsim.validate.parts import Options, Section
from rlsim.validate.rows import Row, markdown, summarise, table

_INTRODUCTION = """\
Figures that papers print, and what rlsim says. *Inputs* may be used to calibrate (the remark says which were),
*outputs* are predicted and never fitted. Error = rlsim / published − 1.

### PAT (LLaMA-3.1-8B, GRPO, 128 responses a step)

"""

_READING = """
How to read it:

- **The baseline.** PAT's authors compare with a tuned static TP without naming it. On eight H100s the static TP whose
  generation time is near the published 134.3 s is TP2. Measured kernels say that static TP4 and TP8 are much faster
  there, so against the *tuned* best little or nothing of the gain remains (next table). On A40s the published latencies
  themselves favour larger TP in the tail.
- **The engine** is SGLang 0.4.8 (with veRL 0.4.1), so the shipped experiments run under SGLang's calibration, fitted
  to later releases; rows with `-vllm` are the same experiments under vLLM's, veRL's default. What is between the two on
  H100 is host time per sequence (15 µs against 47 µs), and attention. On A40 only prompt attention and host time
  differ: PAT's own latencies leave no host time for SGLang there, and vLLM's is that of H100.
- **Which steps.** PAT's figures are means of five steps in which at least one response reaches the cap. So are rlsim's
  in this table; the other tables are over all steps.
- **Throughput** counts the tokens that a step generates, without prompts.
- **Time outside generation.** The published step leaves 38 s for log-probs, training and weight sync. Its training
  setup (packing, offload, micro-batches, mini-batches) is not described; rlsim's, packed sequences under FSDP with
  Ulysses where veRL needs it to start, at the efficiency of measured veRL steps, is faster, and that efficiency rests
  on few rows ([calibration.md](calibration.md#training-efficiency)). It moves step times, tokens/s, shares and step
  speedups; generation times are not touched by it.
- **Generated tokens** of a step are not fitted either: they check the shape of the trace, of which two exceedances are
  published.
- **Back to the first layout.** Every step starts in PAT's first layout again. That is charged as part of the weight
  sync; whether the decode graphs of that layout survive the switch is not published. If they do not, each step begins
  with another pause ("recaptures" under [what decides](#what-decides-between-pat-and-the-tuned-static-tp)), which takes
  most of the gain over the tuned best away.
- **PAT's comparison.** The published rule predicts the remaining time "under the current layout". rlsim compares
  layouts with the sequences spread evenly over their replicas, the present one too. Taking the replicas as they happen
  to be (`spread: actual`) makes an imbalance of the moment look like a reason to switch: many more switches, and a loss
  (there too, "as they are"). This reading is rlsim's, not the paper's.
- **A40 links.** The all-reduce of 2 and 4 GPUs is Vidur's, from another machine; that of 8 GPUs is solved from PAT's
  own latencies. The order of TP4 and TP8 there, and with it PAT's preference for TP4, is no better than that.
- **Layer-wise switch memory**: which buffers count was decided with the published figures in view, so this row is no
  blind prediction.
- **Predictor**: rlsim's PAT interpolates a profile of rlsim's own step times, so its error has no measurement noise.
"""

_STATIC = """
### PAT beside every static TP

Seconds a step; speedup > 1 means that PAT is faster. `bubble` is the share of GPU time in which a GPU does nothing:
at TP8 there is one replica, so no GPU is idle while the tail runs, however badly it is used.

"""


_ROLLPACKER = """
### RollPacker and RLHFuse (Qwen2.5 on H800s, GRPO, 128 × 8 responses a step)

Shipped experiments, two seeds each. *Inputs* that are used: the length curves make the traces; the stage shares of the
14B baseline set what rewards take (by hand, to the nearest round value) and one number of the training stack, the
efficiency at which training is 22% of a step (`scripts/fit_stage_shares.py`: 0.172 of peak, where the calibration says
0.371). What was fitted is an input, but the errors without it had been seen, so rows with that efficiency are no blind
predictions: beside each stands the same with the calibration's ("-unfitted"). As a whole RollPacker is {small} times as
fast as veRL at 7B without that fit and {small_fitted} with it (published: 2.03), at 32B {large} and {large_fitted}
(published: 2.56). While log-probs ran beside rewards, which veRL does not do, a judge's GPUs did not train, and the
planner went by preemptions alone, the fit gave 0.141, and the cumulative speedups with it were 1.38, 1.74, 1.74, 2.03
and 2.45, 2.79, 2.79, 3.09.

"""

_ROLLPACKER_READING = """
How to read it:

- **Cumulative speedups.** The order is right. Beyond 20% is 32B from the planner on. It gains 15% there, in the paper
  2%: to its profile TP 4 and 8 are faster than the published TP 2 for rounds of all kinds, most of all for long ones,
  and so they are in the engine: static veRL at TP 4 would take 0.7 of its time at TP 2. The paper's own profiles seem
  to have said otherwise, or its veRL was not tuned. The stream trainer gains 16% at either size, in the paper 2 and 1%.
  In rlsim half of the GPUs train at no cost but their absence from rollout and the recomputation of the KV that moves;
  what else it costs on a real machine is not published. With the stream trainer in long rounds only, the reading that
  its published long-round gains suggest, the 7B figure changes as [shown below](#what-rollpackers-figures-depend-on).
- **32B tails.** The published length curves end at 16K tokens. Up to 32K the fitted mixture goes on, and veRL waits
  for its longest response in every step: "no response beyond 16K" there shows how much hangs on that.
- **Longest responses.** "Up to 8.9 times shorter" does not name its setting; the ratio is bounded by cap over median.
- **Responses only.** With speculation on responses alone every prompt must get 8 of its 10 responses; how often it does
  not depends on how alike a prompt's responses are, which no paper says (0.7 to 0.75 assumed).
- **Preemptions.** Qwen3-8B's lengths are not published; long reasoning is assumed. rlsim finds the published ratio of
  short to long rounds, but TP2 does not make short rounds faster: vLLM's host time per sequence is paid by half as many
  replicas. The planner's profile says so too: it keeps TP1 in short rounds but for those after a rise of preemptions,
  takes TP2 in most long ones, and is as fast as static TP1.
- **Adaptive timeouts** help where some response to the prompt was right before a program hangs. How correctness spreads
  over prompts is not published.
- **A colocated judge.** Under MPS both sides are taken to slow down by 30% while both work (assumed), in time slices by
  a factor of two. How many layers stay in host memory follows from how long one prefill hides their copying.
- **RLHFuse strengthened.** Whether it kept GPUs for a judge is not published: with a colocated one RollPacker's speedup
  over it falls (last table there).
- **Where tail batching does not pay.** Nearly half of the long-reasoning lengths reach the 8K cap. Then the tail is
  half of the batch, what is launched in vain is as long as the rest, and nothing is gained.
"""

_REAL = """
### REAL: execution plans for PPO (LLaMA-3 7B actor and critic, two nodes of 8 H100)

Prompts and responses of 1,024 tokens each, 512 a step, 8 mini-batches. "Scheduled" takes the published seconds of the
calls and the rule by which both the engine and the search start calls; all else is rlsim's own.

"""

_REAL_READING = """
How to read the errors:

- **List scheduling.** The published calls of the heuristic hold all GPUs one after another and add up to 114.9 s; the
  published iteration takes 122.6 s. So 7.7 s lie in no call, and no order of calls can bring them back: from the calls
  alone the iteration is 6% short there and 11% under the searched plan. Taking what is missing from one figure that is
  not compared here (the heuristic without CUDA graphs: 1.28 s a call, controller and data between calls), the three
  other iteration times come out within 3% ("with outside").
- **Generation** is that of a serving engine; the released code decodes several times slower. Its published script
  sorts the logits of every sequence to sample: 60 us a sequence explain most of it, but that number is read off the
  published seconds, not measured.
- **TP 8.** Every call of the heuristic takes longer in the paper, inference too. Collectives at a third of NCCL's
  measured rate would explain it; which version and settings were used is not published.
- **Recomputation** of activations is on by default in the released code, but the published pipeline of the actor is
  faster than that allows.
"""

_OPPO = """
### OPPO: overlap for PPO (Qwen2.5-7B, seven H200s and one, 112 prompts a step)

Nothing is calibrated here: every figure is predicted.

"""

_OPPO_READING = """
How to read the errors:

- **Lengths** of the answers to Stack Exchange questions are not published, nor their cap. Shipped is another
  question-answering task up to 4K. How much longer the last response is than most decides what letting the next step
  begin without it is worth, and with it all three speedups: [a table](#what-oppos-speedups-depend-on) has the range.
  The order of the three is the published one wherever the cap is 2K or more.
- **Overcommit.** Its bounds are not published; under the shipped, steadily rising reward it grows to 64 prompts beyond
  the batch of 112, which gains more than a few would.
- **Chunk size.** Small chunks cost hand-overs and iterations of the reward model, as published. Large ones cost
  nothing here: a response that is complete goes on at once, and one that ends last has a last chunk of milliseconds.
  So there is no loss beyond 500 tokens as published. A generator that hands complete responses over only at the end of
  a chunk of all its sequences was tried: at 3,000 tokens it loses 0.5%, as the tail takes longer than the scoring.
- **Scoring hidden** is six tenths of the published share: a 7B reward model that stays on its H200 reads 112 responses
  in two seconds. TRL, as veRL, runs nothing beside scoring; were log-probs beside it, four tenths would be hidden.
"""


def run(options: Options) -> Section:
    """The figures of every system; runs every experiment they need (about five minutes)."""
    options.progress("published: PAT")
    runs = pat.run_experiments()
    of_pat = tuple(pat.rows(runs))
    options.progress("published: RollPacker and RLHFuse")
    of_rollpacker = tuple(rollpacker.rows(rollpacker.run_experiments()))
    options.progress("published: REAL")
    of_real = tuple(real.rows(*real.run_experiments()))
    options.progress("published: OPPO")
    of_oppo = tuple(oppo.rows(*oppo.run_experiments()))
    text = "".join(
        (
            *(_INTRODUCTION, table(of_pat), _READING, _STATIC, _static(runs.values())),
            *(_rollpacker(of_rollpacker), table(of_rollpacker), _ROLLPACKER_READING),
            *(_OPPO, table(of_oppo), _OPPO_READING),
            *(_REAL, table(of_real), _REAL_READING),
        )
    )
    rows = (*of_pat, *of_rollpacker, *of_oppo, *of_real)
    return Section(rows, tuple(summarise(rows, depth=2)), text, chart=errors_chart(rows))


def _rollpacker(rows: Iterable[Row]) -> str:
    whole = {row.case.removeprefix("rollpacker/"): row.simulated for row in rows if row.quantity == "speedup"}
    named = {"small": "7b-rollpacker-unfitted", "small_fitted": "7b-rollpacker"}
    named |= {"large": "32b-rollpacker-unfitted", "large_fitted": "32b-rollpacker"}
    return _ROLLPACKER.format(**{key: f"{whole[case]:.2f}" for key, case in named.items()})


def _static(runs: Iterable[pat.Runs]) -> str:
    rows = []
    for result in (result for both in runs for result in (both.h100, both.a40)):
        engine = {"sglang": "SGLang", "vllm": "vLLM"}[
            str(result.manifest["experiment"]["calibration"]).rpartition("-")[2]
        ]
        cluster = f"{result.manifest['cluster']['name']}, {engine}"
        mean = pat.means(result)
        for (case, system), own in mean.items():
            best = mean[case, "pat"]
            rows.append(
                (
                    f"{cluster}, cap {case or result.manifest['experiment']['trace']['cap'] // 1024}"
                    + ("" if case else "K"),
                    system,
                    f"{own['gen_time_s']:.1f}",
                    f"{own['step_time_s']:.1f}",
                    f"{own['gen_time_s'] / best['gen_time_s']:.2f}",
                    f"{own['step_time_s'] / best['step_time_s']:.2f}",
                    f"{own['bubble_fraction']:.0%}",
                    f"{own['switches']:.1f}",
                )
            )
    headings = ("setting", "system", "gen s", "step s", "PAT's gen speedup", "PAT's step speedup", "bubble", "switches")
    return markdown(headings, rows)
