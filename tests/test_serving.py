"""Part `serving` of the validation: the closed loop by hand, host time beside and after the GPU, reading the runs."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from evidence.validate.closed_loop import Intake, Load, Served, closed_loop
from evidence.validate.parts import Options
from evidence.validate.rows import read_rows
from evidence.validate.serving import (
    NO_HOST,
    SERVED,
    TABLE,
    Protocol,
    ServingRun,
    kernels,
    read_runs,
    run_rows,
    section,
    simulate,
)
from evidence.validate.throughput import TABLE as OFFLINE
from evidence.validate.throughput import OfflineRun
from rlsim.cost.assumed import AssumedCosts
from rlsim.cost.calibration import FrontEndFit, HostFit, load_calibration
from rlsim.cost.curve import DecodeCurve, InWindows, at_least
from rlsim.cost.derived import hosted
from rlsim.cost.roofline import step_cost
from rlsim.cost.step import Chunk, StepCost
from rlsim.errors import CapacityError, ConfigError
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model
from rlsim.sim.request import EngineConfig

DECODE_S, PREFILL_S, MIXED_S = 0.01, 0.1, 0.05
AT_ONCE = Intake()
HEADINGS = "model,gpu,engine,release,tp,prompt_tokens,response_tokens,concurrency,ttft_ms,tpot_ms"


class FixedTimes(StepCost):
    """Every decode, prefill and mixed iteration takes the same time, whatever is in it."""

    tp = 1

    def decode(self, batch: int, in_windows: InWindows | None = None) -> DecodeCurve:
        return DecodeCurve(batch, [0.0], [DECODE_S])

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        return PREFILL_S

    def mixed_s(
        self, batch: int, context_tokens: float, chunks: Sequence[Chunk], in_windows: InWindows | None = None
    ) -> float:
        return MIXED_S if batch else PREFILL_S


def loop(
    load: Load, front_end: FrontEndFit | None = None, *, pages: int = 100, intake: Intake = AT_ONCE, **engine: object
) -> Served:
    """A closed loop with fixed times."""
    settings = {"page_tokens": 1, "watermark": 0.0, "max_num_batched_tokens": 100, **engine}
    return closed_loop(FixedTimes(), pages, EngineConfig.model_validate(settings), load, front_end, intake)


# ---- the loop, by hand ----------------------------------------------------------------------------------------------


TOGETHER = {"max_num_batched_tokens": 10, "chunked_prefill": True}


@pytest.mark.parametrize(
    ("load", "front_end", "engine", "ttft_s", "tpot_s"),
    [
        # Both prompts 0 to 0.1 s, two more tokens each; two rounds alike.
        (Load(10, 3, 2, 4), {}, {}, 0.1, 0.01),
        # A alone to 0.1; B's 9 + 1 tokens beside A's two decodes to 0.2, A ends; C's 9 + 1 beside B's to 0.3, B ends; C
        # goes on alone.
        (Load(10, 3, 2, 3), {}, TOGETHER, (0.1 + 0.2 + 0.1) / 3, (0.05 + 0.05 + 0.01) / 3),
        # One place: 0.12 s a response. The first of three waits 0.1 s for its token, the others a response more.
        (Load(10, 3, 2, 3), {}, {"max_num_seqs": 1}, (0.1 + 0.22 + 0.22) / 3, 0.01),
        # Prompts of 10 tokens at 0.05 s each: arrivals at 0.5 and 1.0 s, each alone in the engine.
        (Load(10, 3, 2, 2), {"prompt_token_s": 0.05}, {}, (0.6 + 1.1) / 2, 0.01),
        # Both prompts come to the engine at 0.5 s and run in one iteration.
        (Load(10, 3, 2, 2), {"delay_s": 0.5}, {}, 0.6, 0.01),
        # A's prompt to 0.1, its last token and 9 of B's to 0.15, B's last to 0.25, with 9 of C's if C comes at once.
        # Then B's last token to 0.3, with C's last one or with 9 of C's, whose last one then takes to 0.4.
        (Load(10, 2, 2, 3), {}, TOGETHER, (0.1 + 0.25 + 0.3 - 0.15) / 3, (0.05 + 0.05 + 0.01) / 3),
        (Load(10, 2, 2, 3), {"client_s": 1e-3}, TOGETHER, (0.1 + 0.25 + 0.4 - 0.151) / 3, (0.05 + 0.05 + 0.01) / 3),
        # Prefills end at 0.1 and 0.2 s. The first one's token is handed out when the second has run, the second's at
        # once: the decode that follows starts at 0.2 s.
        (Load(10, 3, 2, 2), {"held_prefills": 1}, {"max_num_batched_tokens": 10}, 0.2, 0.01),
        # One user, three tokens at 0.1, 0.11 and 0.12 s, each 0.05 s of work: the thread is free at 0.25 s. The second
        # request, sent at 0.12 s, comes to the engine then, its first token 0.1 s later. Tokens themselves are in time.
        (Load(10, 3, 1, 2), {"token_s": 0.05}, {}, (0.1 + 0.25 - 0.12 + 0.1) / 2, 0.01),
    ],
)
def test_a_closed_loop_by_hand(
    load: Load, front_end: dict[str, float], engine: dict[str, object], ttft_s: float, tpot_s: float
) -> None:
    served = loop(load, FrontEndFit.model_validate(front_end) if front_end else None, **engine)  # type: ignore[arg-type]
    assert served == Served(pytest.approx(ttft_s), pytest.approx(tpot_s), 0)


@pytest.mark.parametrize(
    ("intake", "prompt_token_s", "joined_s"),
    [
        # A decodes from 0.205 s on, 10 ms a token; B comes at 0.21 s and joins at the boundary, or one later, or with
        # the fifth decode; or both.
        (Intake(), 0.0105, 0.215),
        (Intake(ahead=True), 0.0105, 0.225),
        (Intake(every=5), 0.0105, 0.255),
        (Intake(ahead=True, every=5), 0.0105, 0.265),
        # B comes at 0.326 s, between the sixth decode and the seventh: the engine looks with the tenth.
        (Intake(every=5), 0.0163, 0.363),
        # B comes at 0.16 s, while A is prefilled to 0.18 s: then the engine looks at once.
        (Intake(every=5), 0.008, 0.18),
        (Intake(ahead=True, every=5), 0.008, 0.19),
        # Prompts wait for others while two iterations begin, or until they have enough tokens: B's 10.
        (Intake(wait=2, enough=11), 0.0105, 0.235),
        (Intake(wait=2, enough=10), 0.0105, 0.215),
    ],
)
def test_when_a_busy_engine_takes_a_request_in(intake: Intake, prompt_token_s: float, joined_s: float) -> None:
    front_end, load = FrontEndFit(prompt_token_s=prompt_token_s), Load(10, 12, 2, 2)
    served = loop(load, front_end, intake=intake)
    first_s = 10 * prompt_token_s + PREFILL_S
    assert served.ttft_s == pytest.approx((first_s + joined_s + PREFILL_S) / 2, rel=1e-5)


def test_how_runs_were_made_is_said_of_those_it_is_known_of() -> None:
    run = {"engine": "sglang", "model": "qwen3.5-397b-a17b", "gpu": "b200-sxm", "tp": 4, "lengths": "uniform"}
    run |= {"prompt_tokens": 1024, "response_tokens": 1024, "concurrency": 16, "ttft_ms": 1, "tpot_ms": 1}
    told = ServingRun.model_validate({**run, "release": "0.5.9"})
    assert "MTP" in told.settings.left_out
    with_experts = told.model_copy(update={"ep": 4})
    assert (with_experts.settings.left_out, with_experts.intake) == ("", Intake(ahead=True, every=30))
    assert with_experts.model_copy(update={"concurrency": 8}).intake.every == 10
    deepseek = told.model_copy(update={"model": "deepseek-v3", "release": ""})
    assert (deepseek.settings.really, deepseek.settings.cold) == ({"ep": 4}, True)
    assert not deepseek.model_copy(update={"release": "0.5.9"}).settings.cold
    minimax = told.model_copy(update={"engine": "vllm", "model": "minimax-m2", "release": "0.19.0"})
    assert Protocol().config(minimax).max_num_batched_tokens == 2048
    oss = told.model_copy(update={"engine": "vllm", "model": "gpt-oss-120b", "gpu": "h200-sxm"})
    assert oss.settings.moe_backend == "marlin"
    assert oss.model_copy(update={"lengths": "equal"}).settings.moe_backend is None
    qwen = oss.model_copy(update={"lengths": "equal", "release": "0.12.0", "precision": "fp8_block"})
    assert qwen.settings.moe_backend == "deep_gemm"
    assert qwen.model_copy(update={"release": "0.19.0"}).settings.moe_backend is None


def test_a_preempted_request_has_had_its_first_token() -> None:
    """31 pages hold two requests of 10 + 12 tokens until both have 15: the younger waits for the other's end."""
    ample, scarce = (loop(Load(10, 12, 2, 2), pages=pages) for pages in (100, 31))
    assert (ample.preemptions, scarce.preemptions) == (0, 1)
    assert scarce.ttft_s == ample.ttft_s
    assert scarce.tpot_s > ample.tpot_s


def test_tensorrt_llm_preempts_nobody() -> None:
    said = {"engine": "trtllm", "model": "llama-3.1-70b", "gpu": "h200-sxm", "precision": "fp8", "tp": 1}
    said |= {"prompt_tokens": 1024, "response_tokens": 2048, "concurrency": 128, "ttft_ms": 1, "tpot_ms": 1}
    run, once = ServingRun.model_validate(said), Protocol(rounds=1)
    assert once.pages(run) * 16 < 128 * (1024 + 2048)
    assert simulate(run, kernels(run), NO_HOST, FrontEndFit(), once).preemptions == 0


def test_scarce_kv_makes_a_queue() -> None:
    """13 pages hold one request of 10 + 3 tokens: as with one place."""
    assert loop(Load(10, 3, 2, 3), pages=13) == loop(Load(10, 3, 2, 3), max_num_seqs=1)
    with pytest.raises(CapacityError, match="13 KV pages, the replica has 12"):
        loop(Load(10, 3, 2, 3), pages=12)


# ---- host time ------------------------------------------------------------------------------------------------------

CURVES = {
    "rising": DecodeCurve(4, [0.0, 100.0], [1.0, 2.0]),
    "bent": DecodeCurve(4, [0.0, 100.0, 200.0], [1.0, 1.0, 3.0]),
    "one knot": DecodeCurve(4, [0.0], [1.0]),
    "falling first": DecodeCurve(4, [10.0, 50.0, 90.0], [2.0, 1.0, 4.0]),
}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("floor_s", [0.5, 1.5, 2.5, 100.0])
def test_at_least(name: str, floor_s: float) -> None:
    """The raised curve is the larger of the two everywhere, also beyond the last knot."""
    curve = CURVES[name]
    raised = at_least(curve, floor_s)
    for tokens in (0, 10, 30, 49, 50, 77, 100, 133, 200, 201, 5_000, 20_000, 3_000_000):
        assert raised.step_s(tokens) == pytest.approx(max(curve.step_s(tokens), floor_s), rel=1e-9)
    one_by_one = sum(max(curve.step_s(40 + 4 * i), floor_s) for i in range(50))
    assert raised.steps_s(40, 50) == pytest.approx(one_by_one)


@pytest.mark.parametrize(("groups", "own"), [(1, 7), (4, 2)])
def test_host_after_the_gpu_comes_on_top_of_the_kernels(groups: int, own: int) -> None:
    """1 ms a step, 20 us a sequence of the busiest process, 3 ms a prefill."""
    host = HostFit(step_s=1e-3, sequence_s=2e-5, prefill_s=3e-3, source="test")
    step, chunks = hosted(FixedTimes(), host, groups), [Chunk(512, 0), Chunk(100, 412)]
    assert step.decode(7).step_s(9_000) == pytest.approx(DECODE_S + 1e-3 + own * 2e-5)
    assert step.prefill_s(chunks) == pytest.approx(PREFILL_S + 4e-3 + (2 if groups == 1 else 1) * 2e-5)
    assert step.mixed_s(5, 9_000, chunks) == pytest.approx(MIXED_S + 4e-3 + own * 2e-5)
    assert hosted(FixedTimes(), host.model_copy(update={"step_s": 0.0, "sequence_s": 0.0, "prefill_s": 0.0})).tp == 1


# ---- reading the runs -----------------------------------------------------------------------------------------------


def write(folder: Path, *lines: str, headings: str = HEADINGS) -> Path:
    """A table of serving runs in `folder`."""
    (folder / TABLE).write_text("\n".join((headings, *lines)) + "\n", encoding="utf-8")
    return folder


def line(backend: str, tp: int, prompt: int, response: int, users: int, ttft: object = 50.0, tpot: float = 8.0) -> str:
    model = "llama-3.1-8b" if backend == "trtllm" else "qwen3-32b"
    return f"{model},h100-sxm,{backend},1,{tp},{prompt},{response},{users},{ttft},{tpot}"


def test_runs_in_order(tmp_path: Path) -> None:
    vllm = line("vllm", 8, 64, 8, 2), line("vllm", 2, 128, 8, 1), line("vllm", 2, 64, 8, 4)
    write(tmp_path, *vllm, line("sglang", 4, 64, 8, 1))
    runs = read_runs(tmp_path)
    assert [run.case for run in runs] == [
        "sglang/qwen3-32b/tp4/64+8x1",
        "vllm/qwen3-32b/tp2/64+8x4",
        "vllm/qwen3-32b/tp2/128+8x1",
        "vllm/qwen3-32b/tp8/64+8x2",
    ]
    assert runs[0].setting == "sglang/qwen3-32b/tp4"
    assert (runs[0].seconds("ttft_s"), runs[0].seconds("tpot_s")) == (pytest.approx(0.05), pytest.approx(0.008))


def test_a_damaged_table_is_named_with_its_row(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"h100_serving\.csv: no such file"):
        read_runs(tmp_path)
    good = line("vllm", 2, 64, 8, 1)
    for bad, message in (
        (line("vlm", 2, 64, 8, 2), "row 3: engine: "),
        (line("vllm", 2, 64, 8, 1, ttft="fast"), "row 3: ttft_ms: expected a number"),
        (line("vllm", 2, 64, 8, 1, ttft=-3.0), "row 3: ttft_ms: expected more than 0"),
        (line("vllm", 2, 64, 8, 0), "row 3: concurrency: expected more than 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_runs(write(tmp_path, good, bad))
    with pytest.raises(ConfigError, match="row 2: ttft_ms: required, but missing"):
        read_runs(write(tmp_path, good, headings=HEADINGS.replace("ttft_ms", "ttft_s")))


# ---- the part -------------------------------------------------------------------------------------------------------


def a_run(engine: str, users: int, prompt: int = 1024) -> ServingRun:
    sizes = {"tp": 4, "prompt_tokens": prompt, "response_tokens": 512, "concurrency": users}
    return ServingRun.model_validate(
        {"engine": engine, "model": "qwen3-32b", "gpu": "h100-sxm", **sizes, "ttft_ms": 1.0, "tpot_ms": 1.0}
    )


def test_protocol() -> None:
    protocol = Protocol()
    assert [protocol.load(a_run("vllm", users)).requests for users in (8, 128)] == [80, 1280]
    assert [protocol.load(a_run("sglang", users)).requests for users in (8, 128)] == [160, 2000]
    assert Protocol(rounds=3).load(a_run("sglang", 128)).requests == 384
    vllm, trtllm = protocol.config(a_run("vllm", 64)), protocol.config(a_run("trtllm", 64))
    assert (vllm.chunked_prefill, vllm.max_num_batched_tokens, vllm.max_num_seqs) == (True, 64 + 1024 + 1500, 64)
    assert trtllm.max_num_seqs == 63
    assert Protocol(idle_slots=0).config(a_run("trtllm", 64)).max_num_seqs == 64
    budgets = [protocol.config(a_run("sglang", 64, prompt)).max_num_batched_tokens for prompt in (1024, 2048, 4096)]
    assert budgets == [1024 + 1500, 2048 + 1500, 4096 + 1500]
    whole = [protocol.config(a_run("trtllm", 64, prompt)).max_num_batched_tokens for prompt in (1024, 2048)]
    assert whole == [64 + 2 * 1024, 64 + 2048]
    assert not protocol.config(a_run("sglang", 64)).chunked_prefill


def test_part_on_a_small_table(tmp_path: Path) -> None:
    """Two runs: rows, kinds and names; more users are slower; host time adds to each token."""
    data = write(tmp_path, *(line("vllm", 2, 64, 8, users) for users in (1, 4)))
    found = section(Options(evidence=data, quick=True))
    case = "vllm/qwen3-32b/tp2/64+8x"
    assert [(row.part, row.case, row.quantity, row.kind) for row in found.rows] == [
        ("serving", f"{case}{users}", quantity, "input") for users in (1, 4) for quantity in ("tpot_s", "ttft_s")
    ]
    assert [(s.group, s.quantity, s.kind, s.count) for s in found.summaries] == [
        ("vllm/qwen3-32b", quantity, "input", 2) for quantity in ("tpot_s", "ttft_s")
    ]
    assert "vllm/qwen3-32b" in found.tables["summaries"]
    (run, _), none = read_runs(data), FrontEndFit()
    bare = HostFit(step_s=0.0, sequence_s=0.0, source="test")
    (fast, _), (slow, _) = (
        run_rows("serving", run, "input", host, none) for host in (bare, bare.model_copy(update={"step_s": 2e-3}))
    )
    assert slow.simulated - fast.simulated == pytest.approx(2e-3, rel=1e-6)  # one user: pure decode steps


def test_measured_runs() -> None:
    """The numbers of requests agree with the means' digits: N times a mean of N whole nanoseconds is whole."""
    runs = read_runs(Options().evidence)
    assert len(runs) == 147
    for engine in SERVED:
        own = [r for r in runs if r.engine == engine]
        whole = 0
        for r in own:
            for measured_ms in (r.ttft_ms, r.tpot_ms):
                total_ns = measured_ms * 1e6 * Protocol().load(r).requests
                whole += abs(total_ns - round(total_ns)) < 0.02
        assert whole > 0.5 * 2 * len(own)  # by chance 4%; runs with failed requests have a few fewer


# Offline batches ------------------------------------------------------------------------------------------------------


def test_a_rollout_has_no_host_time_of_a_server() -> None:
    """Unless the experiment says how much a sequence takes."""
    trtllm, vllm = load_calibration("h100-trtllm"), load_calibration("h100-vllm")
    host = trtllm.host.in_rollouts
    assert (host.step_s, host.sequence_s, host.prefill_s) == (trtllm.host.step_s, 0.0, 0.0)
    assert trtllm.host.sequence_s > 6e-5
    assert vllm.host.in_rollouts is vllm.host
    stated = trtllm.drawn(0, AssumedCosts(host_per_sequence=20e-6)).host.in_rollouts
    assert (stated.step_s, stated.sequence_s, stated.prefill_s) == (host.step_s, 20e-6, 0.0)
    model, node = load_model("llama-3.1-8b"), load_cluster("8xh100")
    steps = [step_cost(model, 8, node, one).decode(1024).step_s(1e5) for one in (trtllm, trtllm.drawn(0, STATED))]
    assert steps[0] < 0.4 * steps[1]
    assert steps[1] == trtllm.host.step_s + 1024 * STATED.host_per_sequence


STATED = AssumedCosts(host_per_sequence=60e-6)


def test_limits_of_an_offline_benchmark_by_hand() -> None:
    """Of 80 GB 8.03 are weights: 0.95 of the rest holds 522 sequences of 2,000 tokens of 65,536 bytes, so 640 may run,
    and tokens for these and one prompt for each response."""
    run = OfflineRun(
        engine="trtllm", model="llama-3.1-8b", gpu="h100-sxm", precision="fp8", tp=1,
        prompt_tokens=1000, response_tokens=1000, concurrency=3000, tokens_per_s=15220,
    )  # fmt: skip
    assert run.limits() == (640, 2048)
    assert run.model_copy(update={"prompt_tokens": 20_000, "response_tokens": 2000}).limits() == (64, 20_064)
    assert run.shown == "/h100-sxm/llama-3.1-8b-fp8/tp1/1000+1000"


@pytest.mark.parametrize(
    "shown",
    [
        "1.0/h100-sxm/llama-3.1-405b-fp8/tp8/20000+2000",
        "1.0/h200-sxm/qwen3-235b-a22b-fp8/tp1-ep8-dp8/1000+2000",
        "0.14/a100-sxm-80gb/mixtral-8x7b-bf16/tp2/2048+2048",
    ],
)
def test_measured_batches_are_within_the_target(shown: str) -> None:
    (run,) = [run for run in read_rows(Options().evidence / OFFLINE, OfflineRun) if run.shown == shown]
    assert run.rate() == pytest.approx(run.tokens_per_s, rel=0.15)
