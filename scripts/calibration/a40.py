"""The A40 from Vidur's layers and PAT's four latencies."""

from __future__ import annotations

from pathlib import Path

from calibration.gpus import A40_VIDUR
from calibration.measured import ELEMENTWISE_NOTE
from calibration.provenance import COMMON, pat_source, provenance, vidur_source
from calibration.runtime import runtime_of
from calibration.tables import a40_all_reduce, vidur_layers
from calibration.training import large_gemm_share, training_fit
from rlsim.calibrate.build import MIXTURE, with_ring
from rlsim.calibrate.fit.collectives import fit_collective
from rlsim.calibrate.fit.common import as_written, rounded
from rlsim.calibrate.fit.elementwise import fit_elementwise
from rlsim.calibrate.fit.gemm import kernel_gemm
from rlsim.calibrate.importers import vidur
from rlsim.calibrate.steps import NO_HOST
from rlsim.cost.calibration import Calibration, HostFit, Reference
from rlsim.cost.fits import AttentionFit, CollectiveFit, CollectiveFits, KernelFit, OperatorFits
from rlsim.cost.roofline import RooflineStep
from rlsim.hardware import load_cluster
from rlsim.models import load_model

#: PAT, LLaMA-3.1-8B near 1K tokens of context on 8xA40: (TP, sequences per replica) -> seconds per token.
PAT_LATENCIES = {(2, 1): 15.37e-3, (8, 1): 9.64e-3, (2, 32): 24.41e-3, (8, 128): 30.87e-3}
PAT_CONTEXT = 1024
#: Rate of a rank while PAT reshards weights: an all-gather of 16.06 GB / 2 in 1.03 s.
PAT_RESHARD = 16.06e9 / 2 / 1.03
#: Same for KV: 2 * layers * kv_dim * bytes * sum of contexts / TP_src = 9 sequences of 12K tokens at TP2, in 2.36 s.
PAT_MIGRATE = 2 * 32 * 1024 * 2 * 9 * 12288 / 2 / 2.36


def fit_a40(data: Path, donor: Calibration) -> Calibration:
    """The calibration under SGLang, PAT's engine (0.4.8); prompt attention is `donor`'s.

    PAT's two TP2 latencies give the host time (never negative), its two TP8 latencies the 8-GPU all-reduce (latency
    and rate), because Vidur's own 8-GPU all-reduce takes three times what PAT's figures leave for it.
    """
    ref = Reference.of(load_cluster("8xa40"))
    layers = vidur_layers(data, A40_VIDUR)
    gemms = vidur.gemm_table(layers)
    gemm = kernel_gemm(gemms, ref, cold=False)
    memory = fit_elementwise(vidur.elementwise_table(layers), ref, ELEMENTWISE_NOTE)
    small = {gpus: fit_collective(table) for gpus, table in a40_all_reduce(data).items()}
    version = "vLLM-era kernels of 2024"
    all_reduce = "A40 all_reduce.csv of commit 6d98aa8 (2 and 4 GPUs)"
    notes = (
        "decode attention: 0.0089 ms + KV bytes / 582 GB/s, describing measured LLaMA-2-7B rows",
        _prefill_note(donor),
        "8-GPU all-reduce: latency and rate solved from PAT's two TP8 latencies; 2 and 4 GPUs: Vidur",
        "all-gather, reduce-scatter and all-to-all: half an all-reduce (ring)",
        MIXTURE,
        *COMMON,
    )
    calibration = Calibration(
        name=f"a40-{donor.engine}",
        gpu="a40",
        engine=donor.engine,
        provenance=provenance((vidur_source(A40_VIDUR, all_reduce, version=version), pat_source()), notes),
        reference=ref,
        operators=OperatorFits(
            gemm=gemm.fit,
            decode_attention=_decode_attention(ref),
            prefill_attention=donor.operators.prefill_attention,
            memory_bound=memory.fit,
        ),
        collectives=_collectives(small, 60e-6, 4e9),
        host=NO_HOST,
        runtime=runtime_of(donor.engine, PAT_RESHARD, PAT_MIGRATE),
        training=training_fit(
            large_gemm_share(gemms, ref.bf16_flop_per_s), ref, "Vidur's a40 mlp.csv, 4,096 tokens, other software"
        ),
        residuals={**gemm.residuals, **memory.residuals},
    )
    return _with_eight_gpus(_with_host(calibration), small, 60e-6, 4e9)


def under_engine(a40: Calibration, donor: Calibration) -> Calibration:
    """`a40`'s GPU and links under `donor`'s engine: its host time, prompt attention and graph batch sizes."""
    prompt = donor.operators.prefill_attention
    shared = tuple(note for note in a40.provenance.notes if not note.startswith("prefill attention"))
    notes = (f"derived: {a40.name} under another engine", _prefill_note(donor), *shared)
    update = {
        "name": f"a40-{donor.engine}",
        "engine": donor.engine,
        "provenance": a40.provenance.model_copy(update={"notes": notes}),
        "operators": a40.operators.model_copy(update={"prefill_attention": prompt}),
        "host": donor.host,
        "front_end": donor.front_end,
        "runtime": runtime_of(donor.engine, PAT_RESHARD, PAT_MIGRATE),
    }
    return a40.model_copy(update=update)


def _prefill_note(donor: Calibration) -> str:
    return f"prefill attention: no A40 table; efficiencies of {donor.name} (nearest SM type)"


def _decode_attention(ref: Reference) -> AttentionFit:
    """0.0089 ms + KV bytes / 582 GB/s describes measured LLaMA-2-7B rows with 3% mean error."""
    kernel = KernelFit(launch_s=8.9e-6, efficiency={"memory": 582e9 / ref.memory_bytes_per_s})
    return as_written(AttentionFit(heads={128: kernel}))


def _collectives(small: dict[int, CollectiveFit], latency_s: float, bytes_per_s: float) -> CollectiveFits:
    """All-reduces on 2 and 4 GPUs as measured, on 8 `latency + bytes / rate`; the rest as parts of a ring."""
    sizes = tuple(2.0**e for e in range(9, 31))
    eight = CollectiveFit(message_bytes=sizes, time_s=tuple(latency_s + size / bytes_per_s for size in sizes))
    curves = {**small, 8: eight}
    ring = as_written(with_ring(CollectiveFits(nccl={"all_reduce": curves})))
    return ring.model_copy(update={"nccl": {**ring.nccl, "all_reduce": curves}})


def _missing_s(calibration: Calibration, tp: int, batch: int) -> float:
    """What a PAT latency leaves over the calibration's step."""
    step = RooflineStep(load_model("llama-3.1-8b"), tp, load_cluster("8xa40"), calibration)
    return PAT_LATENCIES[tp, batch] - step.decode(batch).step_s(batch * PAT_CONTEXT)


def _with_host(calibration: Calibration) -> Calibration:
    missing = [_missing_s(calibration, 2, batch) for batch in (1, 32)]
    host = HostFit(
        step_s=rounded(max(0.0, sum(missing) / 2)),
        sequence_s=0.0,
        source="mean of what PAT's two TP2 latencies (SGLang 0.4.8) leave over the kernels, not below zero",
    )
    return calibration.model_copy(update={"host": host})


def _with_eight_gpus(
    calibration: Calibration, small: dict[int, CollectiveFit], latency_s: float, bytes_per_s: float
) -> Calibration:
    """The 8-GPU all-reduce that gives PAT's two TP8 latencies, found from a first guess.

    The gather of the logits uses the same link, so the two unknowns are solved by iteration.
    """
    model = load_model("llama-3.1-8b")
    count = 2 * model.num_hidden_layers + 1
    low, high = 1 * model.hidden_size * 2.0, 128 * model.hidden_size * 2.0
    for _ in range(60):
        off = [_missing_s(calibration, 8, batch) / count for batch in (1, 128)]
        times = latency_s + low / bytes_per_s + 0.5 * off[0], latency_s + high / bytes_per_s + 0.5 * off[1]
        bytes_per_s = (high - low) / (times[1] - times[0])
        latency_s = times[0] - low / bytes_per_s
        calibration = calibration.model_copy(update={"collectives": _collectives(small, latency_s, bytes_per_s)})
    return calibration
