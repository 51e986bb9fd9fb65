"""Real processes: a decoder under tensor parallelism, rollouts against their simulation, and a whole calibration."""

# ruff: noqa: E402
import contextlib
import json
import math
import os
import signal
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

import rlsim
from evidence.validate import real_run
from evidence.validate.rollout import validate_rollouts
from evidence.validate.rollout_steps import QUICK, Ask, Plan, Samples, fit, shapes
from rlsim.calibrate.measure.bench import Effort, Lap
from rlsim.calibrate.measure.decoder import KvCache, check_degree, weight_splits
from rlsim.calibrate.measure.journal import plan
from rlsim.calibrate.measure.workers import Workers
from rlsim.cost.calibration import load_calibration
from rlsim.cost.derived import ServedStep
from rlsim.cost.roofline import RooflineStep, step_cost
from rlsim.cost.step import Chunk
from rlsim.cost.transfer import kv_rank_bytes
from rlsim.errors import CalibrationError
from rlsim.models.hardware import load_cluster
from rlsim.models.model import Model, load_model

TINY = Model(
    name="tiny",
    model_type="qwen3",  # with norms of queries and keys
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=40,
    dtype_bytes=4,
)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]
LENGTHS = [(5, 9), (3, 1), (8, 4), (4, 20), (6, 7), (2, 12)]
ASKS = tuple(Ask(i, *tokens) for i, tokens in enumerate(LENGTHS))
BUDGET = 12


@pytest.fixture(scope="module")
def two():
    with Workers(2) as workers:
        yield workers


@pytest.fixture
def borrowed(two, monkeypatch):
    """Whoever asks for two workers gets these, as it takes seconds to start others."""

    def workers(count, device="cpu"):
        assert (count, device) == (2, "cpu")
        return contextlib.nullcontext(two)

    two.call(_forget)
    monkeypatch.setattr("rlsim.calibrate.measure.workers.Workers", workers)
    monkeypatch.setattr("rlsim.calibrate.measure.session.Workers", workers)


# A decoder ---


def test_shapes_add_up_to_the_models_parameters():
    for model in (TINY, TINY.model_copy(update={"model_type": "qwen2", "tie_word_embeddings": True})):
        total = sum(torch.Size(split.shape).numel() for layer in weight_splits(model) for split in layer.values())
        assert total == model.parameters


def test_what_cannot_be_built_is_refused():
    experts = TINY.model_copy(update={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8})
    with pytest.raises(CalibrationError, match="experts"):
        weight_splits(experts)
    with pytest.raises(CalibrationError, match="norms over all heads are not built"):
        weight_splits(TINY.model_copy(update={"model_type": "olmo2"}))
    with pytest.raises(CalibrationError, match="41 tokens of the vocabulary do not divide"):
        check_degree(TINY.model_copy(update={"vocab_size": 41}), 2)


def test_every_degree_gives_the_same_logits(two):
    reference = _reference_logits(TINY, [3, 1, 4, 1, 5, 7, 8])
    alone = two.call(_logits, TINY, 1, 2)
    assert torch.allclose(alone[0], alone[1])
    assert torch.allclose(alone[0], reference, atol=1e-4)  # 5 prompt tokens, then 7 and 8 one at a time
    shared = two.call(_logits, TINY, 2, 2)
    assert torch.equal(shared[0], shared[1])
    assert torch.allclose(shared[0], reference, atol=1e-4)


def test_workers_keep_state_and_say_what_went_wrong():
    with Workers(2) as workers:
        processes = workers.pids
        assert workers.call(_count) == [(0, 1), (1, 1)]
        assert workers.call(_count) == [(0, 2), (1, 2)]
        with pytest.raises(CalibrationError, match="measuring process 1: ValueError: one is enough"):
            workers.call(_fail)
        with pytest.raises(CalibrationError, match="not running"):
            workers.call(_count)
    for pid in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_worker_that_dies_is_noticed():
    with Workers(1) as workers, pytest.raises(CalibrationError, match="has died"):
        workers.call(_die)


def test_sums_larger_than_the_shared_buffer(two):
    for total, shares in two.call(_large_sum):
        assert total == (3.0, 3.0, 600_001)
        assert shares == [1.0, 2.0]


# Rollouts ---


@pytest.fixture(scope="module")
def runs(two):
    plans = {
        "tp1": Plan(ASKS, 1, BUDGET),
        "tp2": Plan(ASKS, 2, BUDGET),
        "switch": Plan(ASKS, 1, BUDGET, switch_to=2, switch_at=3),
        "back": Plan(ASKS, 2, BUDGET, switch_to=1, switch_at=3),
        "early": Plan(ASKS, 1, BUDGET, switch_to=2, switch_at=5),  # while some wait for their prefill
    }
    two.call(real_run.prepare, TINY, 3, 40, "float32", (1, 2))
    return {name: real_run.carry_out(two, plan) for name, plan in plans.items()}


def expected(asks):
    """(kind, batch, context tokens, longest) of every iteration of one replica, told token by token."""
    waiting, running, found = [(p, n) for _, p, n in asks], [], []
    while waiting or running:
        if waiting:
            chunk = [waiting.pop(0)]
            while waiting and sum(p for p, _ in chunk) + waiting[0][0] <= BUDGET:
                chunk.append(waiting.pop(0))
            prompts = [p for p, _ in chunk]
            found.append(("prefill", len(chunk), sum(prompts), max(prompts)))
            running += [(p + 1, n - 1) for p, n in chunk]
        else:
            contexts = [c for c, _ in running]
            found.append(("decode", len(running), sum(contexts), max(contexts)))
            running = [(c + 1, n - 1) for c, n in running]
        running = [(c, n) for c, n in running if n > 0]
    return found


def done(run, replica=0):
    return [(i.kind, i.batch, i.context_tokens, i.longest) for i in run.iterations if i.replica == replica]


def test_static_replicas_iterate_as_the_engine_does(runs):
    assert done(runs["tp2"]) == expected(ASKS)
    assert done(runs["tp1"], 0) == expected(ASKS[:3])
    assert done(runs["tp1"], 1) == expected(ASKS[3:])


def test_every_response_finishes_and_says_the_same_under_every_layout(runs):
    for run in runs.values():
        assert set(run.finished_s) == set(range(len(ASKS)))
        assert run.last_token == runs["tp1"].last_token
        assert run.makespan_s == max(run.finished_s.values())


@pytest.mark.parametrize(("name", "first", "then", "at"), [("switch", 1, 2, 3), ("back", 2, 1, 3), ("early", 1, 2, 5)])
def test_a_switch_happens_when_so_many_are_left(runs, name, first, then, at):
    run = runs[name]
    after = [i for i in run.iterations if i.tp == then]
    assert {i.tp for i in run.iterations} == {first, then}
    assert min(i.remaining for i in run.iterations if i.tp == first) > at
    assert max(i.remaining for i in after) <= at
    assert run.pause_s > 0.0
    assert runs["tp1"].pause_s == 0.0


def test_a_switch_between_replicas_of_several_ranks_is_refused():
    worker = type("Worker", (), {"rank": 0, "size": 4, "state": {"decoders": {}}})()
    with pytest.raises(CalibrationError, match="a switch needs"):
        real_run.rollout(worker, Plan(ASKS, 2, BUDGET, switch_to=4, switch_at=1))


def truth(tp, contexts, skew=0.7):
    """Step times to find again: linear in the batch and in the tokens, padding included."""
    padded = sum(contexts) + skew * (len(contexts) * max(contexts) - sum(contexts))
    return (1e-3 + 1e-4 * len(contexts) + 1e-6 * padded) / tp


def synthetic(sequences):
    samples = Samples()
    for kind, shape in shapes(sequences, QUICK):
        sizes = shape[-1]
        seconds = {
            "decode": lambda tp, sizes: truth(tp, sizes),
            "prefill": lambda tp, sizes: 2e-5 * sum(sizes) / tp,
            "switch": lambda _, sizes: 4e-3 + kv_rank_bytes(TINY, sum(sizes), 1) / 2e9,
        }[kind](shape[0], sizes)
        samples.laps[kind, shape] = [(seconds, False)] * 3
    return samples


def test_the_fit_finds_what_made_the_times():
    fitted = fit(TINY, synthetic(12), QUICK, 1000)
    assert fitted.skew == pytest.approx(0.7, abs=1e-3)
    assert fitted.control_s == pytest.approx(4e-3, rel=1e-6)
    assert fitted.migrate_bytes_per_s == pytest.approx(2e9, rel=1e-6)


def test_disturbed_repeats_are_left_out_unless_there_are_no_others():
    samples, calm, bad = Samples(), 1.0, 0.5
    samples.keep("decode", "a", [[Lap(9.0, bad)], [Lap(8.0, bad)]], together=False)
    assert samples.seconds("decode")["a"] == [9.0, 8.0]
    samples.keep("decode", "a", [[Lap(1.0, calm), Lap(7.0, bad)], [Lap(2.0, calm), Lap(3.0, calm)]], together=False)
    assert samples.seconds("decode")["a"] == [1.0, 2.0, 3.0]
    samples.keep("decode", "b", [[Lap(1.0, calm), Lap(5.0, calm)], [Lap(2.0, bad), Lap(6.0, calm)]], together=True)
    assert samples.seconds("decode")["b"] == [6.0]
    assert samples.disturbed == 4 / 8


def test_the_whole_comparison_in_small(borrowed):
    told = []
    rows = validate_rollouts(sequences=12, quick=True, progress=told.append)
    assert {"/".join(row.case.split("/")[:2]) for row in rows} == {"cpu/tp1", "cpu/tp2", "cpu/switch"}
    for case in ("cpu/tp1", "cpu/tp2", "cpu/switch"):
        own = [row for row in rows if row.case == case or row.case.startswith(f"{case}/")]
        quantities = {row.quantity for row in own}
        assert {"makespan_s", "step_s", "finish_s", "throughput_tokens_per_s", "step_median_error"} <= quantities
        assert ("switch_s" in quantities) == (case == "cpu/switch")
        for row in own:
            assert row.part == "rollout"
            assert row.kind == "output"
            assert math.isfinite(row.error)
            assert row.reference > 0.0
            assert row.simulated > 0.0
        makespan = next(row for row in own if row.quantity == "makespan_s")
        assert "inconclusive" in makespan.note or abs(makespan.error) < 0.35
    assert told


def test_too_few_sequences_are_refused():
    with pytest.raises(CalibrationError, match="expected at least 8"):
        validate_rollouts(sequences=4)


# A calibration ---


def test_a_whole_run_on_the_cpu_gives_a_calibration_that_simulates(borrowed, tmp_path, monkeypatch, call):
    """The first points of every operator. Noise is another test's matter: on a busy machine half the points have it."""

    def first_points(setup):
        enough = {"gemm": 8, "collective": 18, "decode_attention": 7, "prefill_attention": 6, "memory_bound": 5}
        enough |= {"decode_step": 4}
        seen = Counter()
        small = [
            point for point in plan(setup) if max((n for n in point.values if not isinstance(n, str)), default=0) < 1e5
        ]
        kinds = [(point, f"{point.operator} {point.row().get('tp')}") for point in small]
        numbered = [(point, seen.update([kind]) or seen[kind]) for point, kind in kinds]
        return {point: 1 for point, number in numbered if number <= enough.get(point.operator, 2)}

    monkeypatch.setattr("rlsim.calibrate.measure.journal.NOISY", float("inf"))
    monkeypatch.setattr("rlsim.calibrate.measure.session.plan", first_points)
    monkeypatch.setattr("rlsim.calibrate.measure.session.Effort", lambda **_: Effort(1, 3, 0.0, 0.01))
    words = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2}
    words |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(words))
    out = tmp_path / "out"
    arguments = ["calibrate", "--device", "cpu", "--model", tmp_path / "config.json", "--out", out, "--budget", "300s"]
    made = call(*arguments, "--tp", "1,2")
    assert made.code == 0, made.err
    assert "on points that its fits have not seen" in made.out
    (path,) = out.glob("cpu-*-torch.yaml")
    calibration, cluster, model = (
        load_calibration(path),
        load_cluster(str(out / "cluster.yaml")),
        load_model(out / "model.yaml"),
    )
    assert (model.dtype_bytes, calibration.gpu) == (4, cluster.gpu.name)
    for tp in (1, 2):
        step = RooflineStep(model, tp, cluster, calibration)
        assert 0.0 < step.decode(2).step_s(128) < step.decode(2).step_s(4096) < 1.0
        assert 0.0 < step.prefill_s([Chunk(64, 0)]) < 1.0
    assert isinstance(step_cost(model, 1, cluster, calibration), ServedStep)
    experiment = {
        "name": "own-machine",
        "cluster": str(out / "cluster.yaml"),
        "model": str(out / "model.yaml"),
        "calibration": str(path),
        "trace": {"path": "rollpacker-math", "cap": 64},
        "workflow": {"prompts": 2, "responses": 2, "steps": 1},
        "seeds": 1,
        "systems": [{"verl": {"tp": [1, 2]}}],
    }
    assert (rlsim.run(experiment).steps["step_time_s"] > 0).all()
    _, *lines = (out / "measurements.jsonl").read_text().splitlines()
    measured = {json.loads(line)["point"][0] for line in lines}
    assert measured >= {"gemm", "copy", "decode_step", "prefill_step", "collective"}
    assert "workers 2 (now 1)" in call(*arguments, "--tp", "1").err


# ---- on the workers --------------------------------------------------------------------------------------------------


def _forget(worker):
    worker.state.pop("steps", None)  # weights of another model


def _flat(prompts):
    return torch.tensor([token for prompt in prompts for token in prompt])


def _built(worker, model, tp):
    cache = KvCache(model, 4, 32, "cpu", torch.float32)
    return real_run.build_decoder(worker, model, tp, cache, torch.float32)


def _logits(worker, model, tp, further):
    """Logits of the first prompt after its prefill and `further` decode steps, with the other prompts beside it."""
    with torch.inference_mode():
        decoder = _built(worker, model, tp)
        hidden = decoder.prefill(_flat(PROMPTS), [len(prompt) for prompt in PROMPTS], 0)
        contexts = torch.tensor([len(prompt) for prompt in PROMPTS])
        for token in (7, 8)[:further]:
            contexts = contexts + 1
            hidden = decoder.decode(torch.full((3,), token), contexts, int(contexts.max()))
        return _all_logits(decoder, hidden)[0]


def _all_logits(decoder, hidden):
    return torch.cat(decoder.ranks.all_gather(torch.nn.functional.linear(hidden, decoder.head)), 1)


def _reference_logits(model, tokens):
    """The last token's logits by the plainest code: whole sequence at once, no cache, heads repeated, full weights."""
    from rlsim.calibrate.measure.decoder import EPSILON, ROTARY_BASE, random_weight

    weights = [
        {
            name: random_weight(split, number * 100 + place, "cpu", torch.float32)
            for place, (name, split) in enumerate(layer.items())
        }
        for number, layer in enumerate(weight_splits(model))
    ]
    *layers, around = weights
    n, d, heads, kv_heads = len(tokens), model.head_dim, model.num_attention_heads, model.num_key_value_heads

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * weight

    def rotate(x):
        angle = torch.arange(n)[:, None, None] * ROTARY_BASE ** -(torch.arange(0, d, 2) / d)
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    x = around["embedding"][tokens]
    for w in layers:
        q, k, v = (norm(x, w["attention_norm"]) @ w["qkv"].T).split((heads * d, kv_heads * d, kv_heads * d), 1)
        q = rotate(norm(q.view(n, heads, d), w["q_norm"]))
        k = rotate(norm(k.view(n, kv_heads, d), w["k_norm"]))
        k, v = (y.repeat_interleave(heads // kv_heads, 1) for y in (k, v.view(n, kv_heads, d)))
        scores = torch.einsum("qhd,khd->hqk", q, k) / d**0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", scores, v).reshape(n, -1) @ w["o"].T
        gate, up = (norm(x, w["mlp_norm"]) @ w["gate_up"].T).chunk(2, 1)
        x = x + (torch.nn.functional.silu(gate) * up) @ w["down"].T
    return (norm(x, around["norm"]) @ around["head"].T)[-1]


def _count(worker):
    worker.state["calls"] = worker.state.get("calls", 0) + 1
    return worker.rank, worker.state["calls"]


def _fail(worker):
    if worker.rank == 1:
        raise ValueError("one is enough")
    worker.all.together()


def _die(worker):
    os.kill(os.getpid(), signal.SIGKILL)


def _large_sum(worker):
    ranks = worker.ranks(2)
    x = torch.full((600_001,), float(worker.rank + 1))
    shares = [float(share.mean()) for share in ranks.all_gather(x)]
    ranks.all_reduce(x)
    return (float(x.min()), float(x.max()), len(x)), shares
