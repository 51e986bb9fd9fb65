"""Speculative decoding: what a step yields and takes, what a draft keeps on a GPU, and what does not go together."""

from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from conftest import TINY
from workloads import LinearStep

import rlsim
from evidence.validate.parts import EVIDENCE
from evidence.validate.rows import read_rows
from evidence.validate.speculation import GAINS, TABLE, DraftedRun, Gain, chance, gain_table, rows_of, served
from rlsim.cost.calibration import load_calibration
from rlsim.cost.derived import Change, DerivedStep
from rlsim.cost.layout import PLAIN
from rlsim.cost.memory import rollout_memory
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.roofline import RooflineStep, step_cost
from rlsim.cost.speculation import DraftedStep, Drafts, Speculation, SpeculativeStep, speculative
from rlsim.cost.step import Chunk, Conditions, StepCost
from rlsim.cost.weight_sync import REMAPPED_BYTES_PER_S
from rlsim.errors import ConfigError
from rlsim.experiment.ledger import ledgers
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model
from rlsim.sim.drawn import AcceptanceDraws

H100 = load_cluster("8xh100")
KERNELS = load_calibration("h100-vllm")
SETTINGS = {**TINY, "trace": {"fixed": 300, "cap": 300}, "systems": [{"verl": {"tp": 1}}], "certainty": 0}


def drafts(target: str, **settings: Any) -> Drafts:
    spec = Speculation(**settings)
    return Drafts.of(spec, load_model(target).served(), load_model(spec.model) if spec.model else None)


def cost(target: str, tp: int = 1, **settings: Any) -> StepCost:
    return speculative(load_model(target).served(), tp, H100, KERNELS, PLAIN, drafts(target, **settings))


def toy(base_s: float) -> LinearStep:
    """Steps of `base_s` and 1 us for each token of context; prompts take 1 ms for each token more."""
    return LinearStep(a=base_s, t=1e-6, p=1e-3)


def test_what_a_step_yields_by_hand() -> None:
    one = Speculation(method="eagle3", num_speculative_tokens=3, acceptance=0.5)
    assert one.accepted == (0.5, 0.25, 0.125)
    assert [one.yielded(k) for k in range(4)] == [1.0, 1.5, 1.75, 1.875]
    listed = Speculation(method="mtp", num_speculative_tokens=2, acceptance=(0.886, 0.77, 0.663))
    assert listed.yielded(2) == pytest.approx(2.656)


def test_a_token_takes_its_share_of_a_step() -> None:
    """Steps of 10 ms (plain) or 12 ms with one drafted token and 24 ms with two, each with 1 us a token of context."""
    toys = {1: toy(12e-3), 2: toy(24e-3)}
    spec = Speculation(method="eagle", num_speculative_tokens=2, acceptance=(0.5, 0.5))
    always = SpeculativeStep(toy(10e-3), {2: toys[2]}, spec)
    assert always.decode(4).step_s(6000) == pytest.approx(30e-3 / 2)
    assert always.decode(4).steps_s(6000, 3) == pytest.approx((90e-3 + 12e-6) / 2)
    assert always.prefill_s([Chunk(5, 0)]) == pytest.approx(29e-3)
    assert always.mixed_s(4, 6000, [Chunk(5, 0)]) == pytest.approx(15e-3 + 5e-3)
    below = spec.model_copy(update={"disable_by_batch_size": 4})
    assert SpeculativeStep(toy(10e-3), {2: toys[2]}, below).decode(5).step_s(6000) == pytest.approx(16e-3)
    rows = ((2, 4, 2), (8, 9, 1), (12, 20, 0))
    table = spec.model_copy(update={"num_speculative_tokens_per_batch_size": rows})
    assert list(table.drafted) == [1, 2]
    by_size = SpeculativeStep(toy(10e-3), toys, table)
    found = [by_size.decode(batch).step_s(0) for batch in (1, 4, 6, 8, 11, 12, 99)]
    assert found == pytest.approx([12e-3, 12e-3, 12e-3, 8e-3, 8e-3, 10e-3, 10e-3])
    fastest = SpeculativeStep(toy(10e-3), toys, spec.model_copy(update={"dynamic": True})).decode(4)
    for tokens, token_s in ((0, 12e-3 / 1.5), (1000, 13e-3 / 1.5), (20_000, 32e-3 / 1.5), (30_000, 54e-3 / 2)):
        assert fastest.step_s(tokens) == pytest.approx(min(token_s, 10e-3 + tokens * 1e-6))
    stepped = sum(fastest.step_s(15_000 + 4 * i) for i in range(5000))
    assert fastest.steps_s(15_000, 5000) == pytest.approx(stepped, rel=1e-12)


def test_what_drafts_yield_under_conditions() -> None:
    """A draft three updates old whose tokens lose a fifth of their chance with each; then a fresh one every fourth."""
    toys, short = {2: toy(24e-3)}, Conditions(short=True)
    spec = Speculation(method="eagle", num_speculative_tokens=2, acceptance=0.5, drift=0.2, disable_by_kv_usage=0.75)
    step = SpeculativeStep(toy(10e-3), toys, spec)
    assert (step.conditional, step.most_kv) == (True, 0.75)
    assert step.under(Conditions()) is step
    assert step.under(short).decode(4).step_s(6000) == toy(10e-3).decode(4).step_s(6000)
    assert spec.under(Conditions(version=3)).accepted == pytest.approx((0.5 * 0.8**3, 0.25 * 0.8**6))
    assert step.under(Conditions(version=1)).decode(4).step_s(6000) == pytest.approx(30e-3 / (1 + 0.4 + 0.16))
    assert [step.best.decode(4).step_s(tokens) for tokens in (0, 30_000)] == pytest.approx([10e-3, 54e-3 / 1.75])
    beside = DerivedStep(step, lambda *_: Change(scale=2.0))
    assert (beside.conditional, beside.most_kv) == (True, 0.75)
    assert beside.under(short).decode(4).step_s(6000) == pytest.approx(32e-3)
    budgets = Speculation(
        method="eagle", num_speculative_tokens=3, acceptance=0.5, num_speculative_tokens_per_length={"1K": 1, 4000: 3}
    )
    at = SpeculativeStep(toy(10e-3), {1: toy(12e-3), 3: toy(24e-3)}, budgets)
    assert (list(at.lengths), list(budgets.drafted)) == ([1024, 4000], [1, 3])
    found = [at.under(Conditions(level=level)).decode(4).step_s(6000) for level in range(3)]
    assert found == pytest.approx([16e-3, 18e-3 / 1.5, 30e-3 / 1.875])
    assert at.under(Conditions(level=1)).mixed_s(4, 6000, [Chunk(5, 0)]) == pytest.approx(18e-3 / 1.5 + 5e-3)
    fresh = spec.model_copy(update={"draft_age": 3, "refresh": 4})
    ages = [fresh.under(Conditions(version=version)).accepted[0] for version in range(6)]
    assert ages == pytest.approx([0.5 * 0.8**age for age in (3, 0, 1, 2, 3, 0)])


def test_verification_is_more_tokens_over_the_same_cache() -> None:
    """Three tokens of each of 8 sequences: products and head as of 24 sequences, attention as of 8."""
    model = load_model("llama-3.1-8b")
    three = RooflineStep(model, 2, H100, KERNELS, queries=3).breakdown(8, 16_000)
    plain = RooflineStep(model, 2, H100, KERNELS)
    more = plain.breakdown(24, 16_000)
    assert {name: three[name] for name in more if name != "attention"} == {
        name: time_s for name, time_s in more.items() if name != "attention"
    }
    assert three["attention"] == plain.breakdown(8, 16_000)["attention"]
    many = RooflineStep(model, 2, H100, KERNELS, queries=129).breakdown(8, 160_000)  # 516 rows for each KV head
    assert many["attention"] > 1.5 * plain.breakdown(8, 160_000)["attention"]


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-20b", "deepseek-v2-lite", "qwen3-next-80b-a3b"])
def test_more_queries_never_take_less_and_never_more_than_as_many_sequences(model: str) -> None:
    steps = {q: RooflineStep(load_model(model), 2, H100, KERNELS, queries=q) for q in (1, 2, 5)}
    for batch, context in ((1, 500), (16, 4000), (128, 9000)):
        one, two, five = (steps[q].decode(batch).step_s(batch * context) for q in (1, 2, 5))
        assert one <= two <= five <= steps[1].decode(5 * batch).step_s(5 * batch * context) * 1.02
        mixed = [steps[q].mixed_s(batch, batch * context, [Chunk(512, 0)]) for q in (1, 2)]
        assert mixed[0] <= mixed[1]


def test_a_tree_verifies_its_nodes_and_drafts_level_by_level() -> None:
    """Eight nodes of three levels by four branches: a step of 8 queries, a pass of 4 of each sequence, two of 4."""
    target, spec = "llama-3.1-8b", {"method": "eagle3", "num_speculative_tokens": 3, "acceptance": 0.7}
    chain, same, tree = (
        cost(target, **spec, **more) for more in ({}, {"num_draft_tokens": 4}, {"num_draft_tokens": 8, "topk": 4})
    )
    for batch, context in ((1, 500), (16, 4000), (128, 9000)):
        one, two, three = (step.decode(batch).step_s(batch * context) for step in (chain, same, tree))
        assert one == two < three
    drafted = tree._steps[3]  # type: ignore[attr-defined]
    while not isinstance(drafted, DraftedStep):
        drafted = drafted._cost
    model, of = load_model(target).served(), drafts(target, **spec)
    assert of.model is not None
    verify, later = (
        RooflineStep(model, 1, H100, KERNELS, queries=8),
        RooflineStep(of.model, 1, H100, KERNELS, queries=4),
    )
    joined = later.operators.gemm_s(64, model.hidden_size, 2 * model.hidden_size)
    spared = later.head_s(64) - later.head_s(16)  # only the last accepted token needs the first pass' output head
    expected = verify.decode(16).step_s(64_000) + 3 * (later.decode(16).step_s(64_000) + joined) - spared
    assert drafted.decode(16).step_s(64_000) == pytest.approx(expected, rel=1e-12)


def test_drafts_that_cost_nothing_and_are_always_accepted_pay_alone() -> None:
    rng = np.random.default_rng(3)
    for model, k in zip(("llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b"), rng.integers(1, 9, 3).tolist(), strict=True):
        plain = step_cost(load_model(model).served(), 1, H100, KERNELS.scheduled(False))
        drafted = cost(model, method="ngram", num_speculative_tokens=k, acceptance=1.0)
        for context in rng.integers(1, 20_000, 5).tolist():
            assert drafted.decode(1).step_s(context) <= plain.decode(1).step_s(context)


@pytest.mark.parametrize("method", ["ngram", "eagle3", "mtp", "draft_model"])
def test_parts_and_lookups_of_a_speculating_step(method: str) -> None:
    model = "qwen3.5-9b" if method == "mtp" else "qwen3-8b"
    small = {"model": "qwen3-0.6b", "draft_tensor_parallel_size": 1} if method == "draft_model" else {}
    step = cost(model, 2, method=method, num_speculative_tokens=3, acceptance=0.7, dynamic=True, **small)
    for batch in (1, 64):
        parts = step.breakdown(batch, batch * 3000)
        assert sum(parts.values()) == pytest.approx(step.decode(batch).step_s(batch * 3000), rel=1e-9)
        assert ("draft" in parts) == (method != "ngram") or batch > 1  # which may do better without
    step.decode(64).steps_s(64 * 3000, 100)
    assert step.lookups().counts["decode_attention"].total() > 1


def test_memory_of_drafts_by_hand() -> None:
    """LLaMA-3.1-8B at TP 2: EAGLE-3 has a layer of 218 M, a head over 32,000 tokens, and 2 · 4096² to join states."""
    layer = 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336
    eagle = drafts("llama-3.1-8b", method="eagle3", num_speculative_tokens=2, draft_vocab_size=32_000).memory(2)
    assert eagle.weights == pytest.approx(2 * ((layer + 4096 * 32_000) / 2 + 2 * 4096**2 + 3 * 4096))
    assert eagle.token == 2 * 2 * 4 * 128
    assert drafts("llama-3.1-8b", method="ngram", num_speculative_tokens=2).memory(2) == (0, 0)
    model = load_model("llama-3.1-8b")
    plain, own = (rollout_memory(model, H100.gpu, 2, draft_bytes=one) for one in ((0.0, 0.0), eagle))
    assert own.weight_bytes - plain.weight_bytes == eagle.weights
    assert own.page_bytes == plain.page_bytes * 33 / 32
    assert own.kv_bytes == pytest.approx(plain.kv_bytes - eagle.weights, rel=1e-4)
    spec = drafts("llama-3.1-8b", method="draft_model", num_speculative_tokens=2, model="llama-3.2-1b")
    assert RolloutCostModel(model, H100, KERNELS, drafts=spec).memory(2).pages < plain.pages
    with pytest.raises(ConfigError, match=r"qwen3-0.6b has a vocabulary of 151,936, llama-3.1-8b one of 128,256"):
        drafts("llama-3.1-8b", method="draft_model", num_speculative_tokens=2, model="qwen3-0.6b")


def run(**speculation: Any) -> Any:
    return rlsim.run(SETTINGS, overrides={"engine.speculation": speculation} if speculation else {})


def test_speculation_shortens_generation_alone() -> None:
    plain, none = run(), run(method="eagle3", num_speculative_tokens=0)
    assert (plain.steps.gen_time_s == none.steps.gen_time_s).all()
    eagle = run(method="eagle3", num_speculative_tokens=2, acceptance=0.7).steps.iloc[0]
    worse = run(method="eagle3", num_speculative_tokens=2, acceptance=0.0).steps.iloc[0]
    all_long, later = (
        run(method="eagle3", num_speculative_tokens=2, acceptance=0.7, num_speculative_tokens_per_length={first: 2})
        for first in (0, 100)
    )
    assert all_long.steps.gen_time_s[0] == eagle.gen_time_s < later.steps.gen_time_s[0] < plain.steps.gen_time_s[0]
    assert eagle.gen_time_s < plain.steps.gen_time_s[0] < worse.gen_time_s
    assert eagle.trained_response_tokens == plain.steps.trained_response_tokens[0]


def test_drawn_yields_agree_with_the_expectation() -> None:
    """One response after the other, so that luck evens out; as many steps by chance as by expectation."""
    settings = {**SETTINGS, "trace": {"fixed": 3000, "cap": 3000}, "seeds": 12, "engine": {"max_num_seqs": 1}}
    three = {"method": "eagle3", "num_speculative_tokens": 3, "acceptance": (0.63, 0.42, 0.28)}

    def seconds(**more: Any) -> Any:
        found = rlsim.run(settings, overrides={"engine.speculation": {**three, **more}}).responses
        return (found.finish_at - found.first_token_at).to_numpy()

    ratios = seconds(drawn=True) / seconds()
    assert abs(ratios.mean() - 1) < 2.2 * ratios.std(ddof=1) / np.sqrt(len(ratios))
    assert 0.01 < ratios.std() < 0.03 < (seconds(drawn=True, correlation=0.3) / seconds()).std()


def test_what_the_expectation_leaves_out() -> None:
    """The figures of docs/speculation.md: luck of 64 responses of 3,000 tokens, by draws of another kind; and steps of
    responses of 365 tokens that scatter by 14%, as measured, where they correlate by 0.08."""
    rng, chances, late = np.random.default_rng(1), np.array([0.63, 0.42, 0.28]), []
    for _ in range(40):
        accepted = (rng.random((64, 1500)) < 0.63).astype(int)
        for further in (0.42 / 0.63, 0.28 / 0.42):
            accepted += (accepted == accepted.max()) * (rng.random(accepted.shape) < further)
        steps = ((1 + accepted).cumsum(axis=1) < 3000).sum(axis=1) + 1
        late.append(steps.max() * (1 + chances.sum()) / 3000)
    assert 1.03 < np.mean(late) < 1.04
    for common, scatter in ((0.0, 0.043), (0.08, 0.14)):
        numbers = np.stack([AcceptanceDraws((7, i), common).ahead(365) for i in range(500)])
        tokens = 1 + sum((numbers < NormalDist().inv_cdf(chance)).astype(int) for chance in chances)
        assert tokens.mean() == pytest.approx(1 + chances.sum(), rel=0.02)
        steps = (tokens.cumsum(axis=1) < 365).sum(axis=1) + 1
        assert np.std(365 / steps) / np.mean(365 / steps) == pytest.approx(scatter, abs=0.01)


def test_a_draft_that_is_trained_along_comes_with_the_weights() -> None:
    """In every step, or half of its time and bytes where it is in every second one."""
    (still, short), (trained, long), (half, between) = (
        run(method="eagle3", num_speculative_tokens=2, refresh=refresh).steps[["sync_time_s", "train_time_s"]].iloc[0]
        for refresh in (False, True, 2)
    )
    assert (long, between) == pytest.approx((1.07 * short, 1.035 * short), rel=1e-3)  # not what the call takes anyway
    assert half == pytest.approx((still + trained) / 2)
    model = load_model(str(TINY["model"]))
    share = drafts(str(TINY["model"]), method="eagle3", num_speculative_tokens=2).memory(1).weights / model.weight_bytes
    awake_s = 2 * 0.9 * load_cluster("8xh100").gpu.memory_bytes / REMAPPED_BYTES_PER_S
    assert trained - awake_s == pytest.approx((1 + share) * (still - awake_s))


def test_what_nobody_said_of_drafts_is_an_assumption() -> None:
    for given, assumed in (
        ({}, ["2.07 tokens a step", "as accepted after each update as before"]),
        ({"acceptance": 0.7, "drift": 0.0}, []),
        ({"acceptance": 0.7, "refresh": True}, ["0.07"]),
        ({"acceptance": 0.7, "refresh": 2, "drift": 0.1, "refresh_cost": 0.1}, []),
    ):
        found = run(method="eagle3", num_speculative_tokens=2, **given).manifest
        rows = [row for _, ledger in ledgers(found) for row in ledger.assumed if row.key.startswith("engine.specul")]
        assert [row.taken for row in rows] == assumed


def test_the_validation_runs() -> None:
    """One user of the measured runs; Triton's experts take less for prompts than Marlin's, with which they ran."""
    runs = [run for run in read_rows(EVIDENCE / TABLE, DraftedRun) if run.concurrency == 1]
    rows, first_s = rows_of(runs), [served(runs[0], own=own).ttft_s for own in (False, True)]
    assert [(row.case, row.quantity) for row in rows] == [
        ("gpt-oss-120b/k0/1", "tokens_per_s"), ("gpt-oss-120b/k1/1", "tokens_per_s"), ("gpt-oss-120b/k1/1", "gain")
    ]  # fmt: skip
    assert all(abs(row.error) < 0.12 for row in rows)
    assert runs[0].seconds("ttft_s") > first_s[0] > 1.5 * first_s[1]
    assert rows[2].reference > 1 < rows[2].simulated
    gains = {one.case: one for one in read_rows(EVIDENCE / GAINS, Gain)}
    assert "| 3.32 | 2." in gain_table([gains["skyrl/qwen3.5-9b"]])
    assert [chance(2.0, 1), chance(1.75, 2)] == pytest.approx([1.0, 0.5])
