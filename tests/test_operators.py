"""Single kernels: hand values, shape of the curves, and what is counted as outside the measured region."""

import itertools
import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from conftest import KERNELS, cases, needs_data

from rlsim.calibrate.fit.gemm import kernel_gemm
from rlsim.cost.calibration import Reference, Residual, load_calibration
from rlsim.cost.fits import AttentionFit, Correction, KernelFit, OperatorFits, ProductFit, Tile
from rlsim.cost.kernel import Surface
from rlsim.cost.operators import Operators
from rlsim.cost.products import KINDS, Block, Products, blocks_of, choose, quantising_blocks
from rlsim.errors import CalibrationError

REFERENCE = Reference(
    bf16_flop_per_s=100e12, memory_bytes_per_s=1e12, sm_count=100, l2_bytes=40e6, link_bytes_per_s=100e9
)


def attention(table: Correction | None = None, **constants: float) -> AttentionFit:
    """Heads of 128: a launch of 5 us, and shares of rates or seconds of units by name."""
    rates = {name: constants.pop(name) for name in ("compute", "block", "memory") if name in constants}
    kernel = KernelFit(launch_s=5e-6, efficiency=rates, added_s=constants, table=table)
    return AttentionFit(heads={128: kernel}, skew=0.1)


def fits(**changes: object) -> OperatorFits:
    parts = {
        "gemm": ProductFit(
            launch_s=1e-6, efficiency={"compute": 1.0, "memory": 0.5}, tiles=(Tile(m=100, n=100, efficiency=0.5),)
        ),
        "decode_attention": attention(memory=0.5, tiles=1e-9, sequences=2e-9),
        "prefill_attention": attention(compute=0.5, block=0.5, memory=1.0, queries=0.0),
        "memory_bound": KernelFit(launch_s=2e-6, efficiency={"memory": 0.5}),
    }
    return OperatorFits(**{**parts, **changes})  # type: ignore[arg-type]


def operators() -> Operators:
    return Operators(fits(), REFERENCE)


BLEND = 3.0


def both(compute_s: float, memory_s: float) -> float:
    return (compute_s**BLEND + memory_s**BLEND) ** (1 / BLEND)


def test_gemm_takes_the_slower_of_compute_and_memory() -> None:
    # one row: 2 * (1000 * 1000 + ...) bytes at 0.5 TB/s take 4 us, a wave of 2 * 100 * 100 * 1000 FLOPs 40 us
    assert operators().gemm_s(1, 1000, 1000) == pytest.approx(1e-6 + both(40e-6, 4e-6), rel=1e-3)
    # 10,000 blocks on 100 SMs are 100 waves of 4 us, but 2 * (1e7 + 1e5 + 1e8) bytes take 440 us
    assert operators().gemm_s(1000, 100_000, 100) == pytest.approx(1e-6 + both(400e-6, 440.4e-6), rel=1e-3)
    one, two = operators().gemm_s(1000, 1000, 10_000), operators().gemm_s(1000, 1000, 10_000, groups=2)
    assert two - 1e-6 == pytest.approx(2 * (one - 1e-6), rel=1e-3)  # 100 blocks each


def test_gemm_takes_the_block_for_so_many_rows() -> None:
    tiles = [Tile(m=16, n=100, efficiency=0.5), Tile(m=64, n=50, efficiency=0.25, from_rows=17)]
    gemm = fits().gemm
    both, *alone = (
        Operators(fits(gemm=gemm.model_copy(update={"tiles": tuple(own)})), REFERENCE)
        for own in (tiles, tiles[:1], [tiles[1].model_copy(update={"from_rows": 1})])
    )
    for rows, which in ((1, 0), (16, 0), (17, 1), (33, 1), (5000, 1)):
        assert both.gemm_s(rows, 1000, 4000) == alone[which].gemm_s(rows, 1000, 4000)


def test_decode_attention_is_a_line() -> None:
    # 5 us + 8 tiles of 1 ns + 4 sequences of 2 ns, and 1,024 bytes a token at half of 1 TB/s
    start, slope = 5e-6 + 8e-9 + 8e-9, 2 * 2 * 128 * 2 / 0.5e12
    for tokens in (0, 100, 100_000):
        assert operators().decode_kernels.curve(4, 2, 128).step_s(tokens) == pytest.approx(start + slope * tokens)


def test_attention_in_a_window_has_its_own_kernel_by_hand() -> None:
    table = Correction(axes={"tiles": (8.0,), "window": (128.0, 1024.0)}, factor=(2.0, 1.5))
    decode = attention(memory=0.5, tiles=0.0).model_copy(update={"windows": attention(table, memory=0.5).heads})
    made = Operators(fits(decode_attention=decode), REFERENCE)
    for dim, window, factor in ((128, 128, 2.0), (128, 4096, 1.5), (64, 128, 1.0)):  # not measured: as without
        read_s = 4 * window * 2 * dim * 4 / 0.5e12
        assert made.decode_kernels.curve(4, 2, dim, window).step_s(4 * window) == pytest.approx(5e-6 + factor * read_s)


def test_prompts_that_their_window_cuts_have_its_pairs_and_a_share_of_the_masked_ones() -> None:
    prompts = attention(compute=0.5)
    masks = prompts.model_copy(update={"windows": attention(compute=0.5, masked=2.0).heads})
    plain, cut = (Operators(fits(prefill_attention=one), REFERENCE) for one in (prompts, masks))
    heads = 100, 20, 128
    for chunks in ([(3000.0, 0.0)], [(2500.0, 500.0), (10.0, 4095.0)]):  # masked pairs at half of the peak as well
        all_s = plain.prefill_attention_s(chunks, *heads)
        assert cut.prefill_attention_s(chunks, *heads, 1000) == pytest.approx(all_s, rel=1e-6)
    pairs = 1000 * 1000 / 2 + 2000 * 1000
    by_hand = 5e-6 + 4 * 128 * 100 * pairs / 50e12
    assert plain.prefill_attention_s([(3000.0, 0.0)], *heads, 1000) == pytest.approx(by_hand)
    for chunks, dim, window in (([(100.0, 0.0)], 128, 100), ([(300.0, 0.0)], 64, 100), ([(300.0, 0.0)], 128, None)):
        shape = 8, 2, dim, window
        assert cut.prefill_attention_s(chunks, *shape) == plain.prefill_attention_s(chunks, *shape)


def corrected(operator: str, axes: dict[str, tuple[float, ...]], factor: tuple[float, ...]) -> Operators:
    plain = fits()
    fit = getattr(plain, operator).model_copy(update={"table": Correction(axes=axes, factor=factor)})
    return Operators(plain.model_copy(update={operator: fit}), REFERENCE)


def test_a_table_is_a_factor_between_its_knots_and_constant_beyond_on_all_but_the_launch() -> None:
    o = corrected("gemm", {"m": (1.0, 100.0), "n": (1000.0,), "k": (1000.0,)}, (1.0, 4.0))
    plain, launch_s = operators(), 1e-6
    for shape, factor in (((1, 1000, 1000), 1.0), ((10, 1000, 1000), 2.0), ((1000, 5000, 500), 4.0)):  # 10: half way
        assert o.gemm_s(*shape) - launch_s == pytest.approx(factor * (plain.gemm_s(*shape) - launch_s))


def test_a_sliced_correction_is_the_same_factor() -> None:
    axes = {"a": (1.0, 4.0, 9.0), "b": (2.0, 8.0), "c": (1.0, 3.0), "d": (1.0, 2.0)}
    surface = Surface(Correction(axes=axes, factor=tuple(1.0 + 0.1 * i for i in range(24))), ("a", "b", "c", "d"))
    cut = surface.sliced(2.0, 1.5)
    for a, b in ((0.5, 1.0), (2.0, 3.0), (9.0, 8.0), (20.0, 5.0)):
        assert cut(a, b) == pytest.approx(surface(a, b, 2.0, 1.5))


def test_no_correction_beats_the_data_sheet() -> None:
    o = corrected("gemm", {"m": (1.0,), "n": (1.0,), "k": (1.0,)}, (1e-3,))
    size = 2.0 * (1e6 + 1e5 + 1e5)
    assert o.gemm_s(100, 1000, 1000) == pytest.approx(size / 1e12)
    table = Correction(axes={"tiles": (1.0,), "context": (100.0, 1e5), "kv_heads": (1.0,)}, factor=(1e-3, 1e-3))
    o = Operators(fits(decode_attention=attention(table, memory=0.5)), REFERENCE)
    assert o.decode_kernels.curve(4, 2, 128).step_s(400_000) == pytest.approx(400_000 * 1024 / 1e12)


def test_a_decode_curve_bends_at_the_knots_of_its_table_and_never_falls() -> None:
    table = Correction(axes={"tiles": (8.0,), "context": (100.0, 10_000.0), "kv_heads": (2.0,)}, factor=(200.0, 1.0))
    o = Operators(fits(decode_attention=attention(table, memory=0.5)), REFERENCE)
    curve = o.decode_kernels.curve(batch=4, kv_heads=2, head_dim=128)
    assert {400.0, 40_000.0} <= set(curve.knots)
    times = [curve.step_s(knot) for knot in curve.knots]
    assert times == sorted(times)
    slope = 2 * 2 * 128 * 2 / 0.5e12
    assert o.decode_kernels.curve(4, 2, 128).step_s(400) == pytest.approx(5e-6 + 200 * slope * 400)
    times = [o.decode_kernels.curve(4, 2, 128).step_s(total) for total in (40_000, 80_000, 800_000)]
    assert times == pytest.approx([5e-6 + slope * total for total in (80_000, 120_000, 840_000)])


def test_a_correction_over_other_axes_is_refused() -> None:
    with pytest.raises(CalibrationError, match="expected m, n, k"):
        corrected("gemm", {"m": (1.0,), "k": (1.0,), "n": (1.0,)}, (1.0,))
    with pytest.raises(ValueError, match="must hold 2 positive numbers"):
        Correction(axes={"m": (1.0, 2.0)}, factor=(1.0,))
    with pytest.raises(ValueError, match="must ascend"):
        Correction(axes={"m": (2.0, 1.0)}, factor=(1.0, 1.0))


def test_prefill_attention_by_hand() -> None:
    # 1000 tokens, 100 heads: half a million pairs a head
    expected = 5e-6 + 4 * 128 * 100 * 500_000 / (100e12 * 0.5)
    assert operators().prefill_attention_s([(1000, 0)], 100, 20, 128) == pytest.approx(expected, rel=0.02)
    # with one head the last block runs alone on one SM: 128 queries x 1000 keys at 1 TFLOP/s x 0.5
    alone = 5e-6 + 4 * 128 * 128_000 / (1e12 * 0.5)
    assert operators().prefill_attention_s([(1000, 0)], 1, 1, 128) == pytest.approx(alone, rel=0.02)
    # Where FLOPs cost nothing: q and output of 32 heads for each new token, k and v of eight for each in the context,
    # 128 wide, in bf16.
    endless = REFERENCE.model_copy(update={"bf16_flop_per_s": 1e20})
    made = Operators(fits(prefill_attention=attention(memory=1.0)), endless)
    moved = 1000 * 2 * 32 + 1000 * 2 * 8
    assert made.prefill_attention_s([(1000, 0)], 32, 8, 128) == pytest.approx(5e-6 + moved * 128 * 2 / 1e12, rel=1e-3)
    moved = 1000 * 2 * 32 + 5000 * 2 * 8  # the cached tokens' keys and values too
    assert made.prefill_attention_s([(1000, 4000)], 32, 8, 128) == pytest.approx(
        5e-6 + moved * 128 * 2 / 1e12, rel=1e-3
    )


def test_look_ups_outside_the_measured_ranges_are_counted() -> None:
    measured = Residual(count=1, median=0.0, p90=0.0, bias=0.0, ranges={"m": (1, 16), "n": (1, 4096), "k": (1, 4096)})
    o = Operators(fits(), REFERENCE, {"gemm": measured})
    o.gemm_s(16, 4096, 4096)
    assert o.lookups.table() == {"gemm": {"interpolated": 1, "extrapolated": 0}}
    for _ in range(2):
        o.gemm_s(17, 4096, 4096)
    assert o.lookups.table() == {"gemm": {"interpolated": 1, "extrapolated": 1}}
    assert o.lookups.examples == {"gemm": "m 17, measured 1 to 16"}
    with pytest.raises(CalibrationError, match=r"'probe' was not measured .* gemm \(1 shapes, e.g. m 17"):
        o.lookups.refuse_extrapolated("probe")
    assert math.isfinite(o.gemm_s(17, 10**6, 10**6))
    ranges = {"m": (1, 16), "n": (256, 4096), "k": (1, 4096)}
    o = Operators(fits(), REFERENCE, {"gemm": Residual(count=1, median=0.0, p90=0.0, bias=0.0, ranges=ranges)})
    o.gemm_s(16, 32, 4096)
    assert o.lookups.table()["gemm"] == {"interpolated": 1, "extrapolated": 0}
    o.gemm_s(17, 32, 4096)
    assert o.lookups.examples == {"gemm": "m 17, measured 1 to 16"}
    ranges["n"] = (512, 4096)  # the narrowest is more than a block
    o = Operators(fits(), REFERENCE, {"gemm": Residual(count=1, median=0.0, p90=0.0, bias=0.0, ranges=ranges)})
    o.gemm_s(16, 32, 4096)
    assert o.lookups.examples == {"gemm": "n 32, measured 512 to 4096"}


@pytest.mark.parametrize("name", ["h100-vllm", "b200-sglang", "a40-vllm", "l40s-trtllm", "h20-vllm"])
def test_routers_take_no_longer_than_the_narrowest_measured_product(name: str) -> None:
    calibration = load_calibration(name)
    o = Operators(calibration.operators, calibration.reference)
    launch_s = calibration.operators.gemms["bf16"].launch_s
    for m, k in itertools.product((1, 16, 256, 4096, 16384), (1024, 2880, 7168)):
        times = [o.gemm_s(m, n, k) for n in (8, 32, 64, 128, 256)]
        assert all(early <= late * 1.001 for early, late in pairwise(times))
        assert times[0] > 0.5 * launch_s


@needs_data
@cases("cost", "narrow products that no fit has seen")
def test_narrow_products_that_no_fit_has_seen(name: str, table: str, error: float) -> None:
    calibration = load_calibration(name)
    o = Operators(calibration.operators, calibration.reference)
    rows = pd.read_parquet(KERNELS / table / "gemm_perf.parquet")
    rows = rows[rows.gemm_dtype.eq("bfloat16") & rows.k.between(1024, 8192) & rows.m.le(16_384)]
    for _, some in rows[rows.n.isin([32, 64, 128])].groupby("n"):
        found = np.array([o.gemm_s(m, n, k) for m, n, k in zip(some.m, some.n, some.k, strict=True)])
        assert float(np.median(abs(found / (1e-3 * some.latency) - 1))) < error


def counted(kernel: str, ask: Callable[[Operators], object], **ranges: tuple[float, float]) -> str:
    """How the look-up counts where this kernel was measured in these ranges."""
    measured = Residual(count=1, median=0.0, p90=0.0, bias=0.0, ranges=ranges)
    o = Operators(fits(), REFERENCE, {kernel: measured})
    ask(o)
    (kind,) = (kind for kind, count in o.lookups.table()[kernel].items() if count)
    return kind


def test_which_look_ups_are_outside() -> None:
    inside, outside = "interpolated", "extrapolated"
    chunks = {(64, 0): inside, (512, 512): inside, (63, 0): outside, (513, 0): outside, (512, 513): outside}
    for chunk, kind in chunks.items():
        found = counted(
            "prefill_attention",
            lambda o, chunk=chunk: o.prefill_attention_s([(128, 0), chunk, (128, 0)], 8, 8, 128),
            new=(64, 512),
            context=(64, 1024),
        )
        assert found == kind, chunk
    for size, kind in ((1000, inside), (2000, inside), (999, outside), (2001, outside)):
        found = counted("memory_bound", lambda o, size=size: o.memory_bound_s(size, 1), bytes=(1000, 2000))
        assert found == kind, size
    for batch, context, kind in ((4, 400, inside), (4, 401, outside), (3, 300, outside)):
        found = counted(
            "decode_attention",
            lambda o, b=batch, t=context: o.count("decode_attention", batch=b, context=t / b, group=4),
            batch=(4, 8),
            context=(1, 100),
            group=(4, 4),
        )
        assert found == kind, (batch, context)
    assert counted("gemm", lambda o: o.gemm_s(4, 10, 10, 8), m=(32, 32)) == inside  # rows of all experts together


# DeepGEMM -------------------------------------------------------------------------------------------------------------

H100 = load_calibration("h100-sglang")
GROUPED = Reference(
    bf16_flop_per_s=500e12,
    fp8_flop_per_s=1000e12,
    memory_bytes_per_s=1e15,
    sm_count=100,
    l2_bytes=40e6,
    link_bytes_per_s=100e9,
)
GROUPED_FIT = ProductFit(
    precision="fp8_block",
    blocks="deepgemm",
    launch_s=4e-6,
    efficiency={**dict.fromkeys(KINDS[:3], 1.0), **dict.fromkeys(KINDS[3:], 0.8), "memory": 0.9},
    added_s={
        "quantised": 0.0,
        "quantising_blocks": 1e-9,
        "steps": 100e-9,
        "blocks": 1e-6,
        "few_spilled": 0.5e-6,
        "many_spilled": 2e-6,
    },
)


@pytest.mark.parametrize(
    ("shape", "block", "waves"),
    [
        ((16, 4096, 4096), Block(16, 32, False), 1),  # 128 blocks on 132 SMs; fewer rows are not to be had
        ((2048, 1536, 4096), Block(128, 192, False), 1),  # 16 x 8 = 128 blocks: one wave, which has no multicast
        ((8192, 16384, 4096), Block(256, 128, True), 32),  # 32 x 128 blocks: the largest load least
    ],
)
def test_it_takes_the_block_of_the_fewest_estimated_cycles(
    shape: tuple[int, int, int], block: Block, waves: int
) -> None:
    m, n, k = shape
    assert choose(m, n, blocks_of(k, 132), 132) == (block, waves)
    known = blocks_of(k, 132)
    least = min(c * -(-(-(-m // b.rows) * -(-n // b.columns)) // 132) for c, b in known if b == block)
    for cycles, other in known:
        count = -(-(-(-m // other.rows) * -(-n // other.columns)) // 132)
        if (other.rows >= 64 or m <= other.rows) and not (other.multicast and count == 1):
            assert count * cycles >= least


def test_blocks_share_loads_on_an_even_number_of_sms_and_groups_are_quantised_together() -> None:
    assert any(block.multicast for _, block in blocks_of(4096, 132))
    assert not any(block.multicast for _, block in blocks_of(4096, 131))
    assert [quantising_blocks(m, 768) for m in (1, 2, 8, 16, 17)] == [3, 3, 3, 6, 51]
    assert quantising_blocks(4.3, 1024) == quantising_blocks(5, 1024) == 5


def test_time_by_hand() -> None:
    products = Products(GROUPED_FIT, GROUPED)
    # One wave of 100 blocks of 128 x 128: 4096 / 128 = 32 steps of 100 ns and 2 * 128^3 FLOPs at 10 TFLOP/s, and 1 us.
    assert choose(1280, 1280, blocks_of(4096, 100), 100) == (Block(128, 128, False), 1)
    compute = 32 * (100e-9 + 2 * 128**3 / 10e12) + 1e-6
    quantise = 1280 * 32 / 16 * 1e-9
    assert products.time_s(1280, 1280, 4096) == pytest.approx(4e-6 + quantise + compute, rel=1e-3)
    # 100 blocks of 128 x 192 alone: uneven columns, and 2 us more for want of registers.
    assert choose(1280, 1920, blocks_of(4096, 100), 100) == (Block(128, 192, False), 1)
    compute = 32 * (100e-9 + 1.25 * 2 * 128 * 128 * 192 / 10e12 + 2e-6) + 1.5e-6
    assert products.time_s(1280, 1920, 4096) == pytest.approx(4e-6 + quantise + compute, rel=1e-3)


def test_the_shipped_fit_knows_the_poor_choices() -> None:
    operators = Operators(H100.operators, H100.reference)
    spilled, next_one = (operators.gemm_s(m, 1536, 4096, precision="fp8_block") for m in (2048, 2049))
    assert 1.5 * next_one < spilled  # measured: 95 and 50 us


def test_on_fewer_sms_blocks_share_nothing_and_products_hide_the_registers() -> None:
    """H20 has L2's bandwidth for its 78 SMs, so that no block is shared. Registers move beside slower products."""
    h20 = load_calibration("h20-sglang")
    block, waves = choose(8192, 8192, blocks_of(8192, 78), 78)
    assert (block, waves) == (Block(256, 128, False), 27)
    product_s = Operators(h20.operators, h20.reference).gemm_s(8192, 8192, 8192, precision="fp8_block")
    bf16_s = Operators(h20.operators, h20.reference).gemm_s(8192, 8192, 8192)
    assert H100.operators.gemms["fp8_block"].added_s["many_spilled"] > 0
    assert h20.operators.gemms["fp8_block"].added_s["many_spilled"] == 0
    assert product_s > 2 * 8192**3 / 296e12, "no faster than the data sheet"
    assert product_s < bf16_s


def test_a_fit_follows_the_librarys_choice_where_rows_do() -> None:
    ref = H100.reference
    known = H100.operators.gemms["fp8_block"].model_copy(update={"table": None})
    assert known.blocks == "deepgemm"
    products, rng = Products(known, ref), np.random.default_rng(0)
    sizes = [
        (int(m), int(n) * 128, int(k) * 128)
        for m, n, k in zip(
            rng.integers(1, 5000, 1500), rng.integers(2, 130, 1500), rng.integers(2, 130, 1500), strict=True
        )
    ]
    rows = pd.DataFrame([(*size, products.time_s(*size)) for size in sizes], columns=["m", "n", "k", "seconds"])
    found = kernel_gemm(rows, ref, cold=True, precision="fp8_block")
    assert found.fit.blocks == "deepgemm"
    assert found.residuals["gemm_fp8_block"].p90 < 0.02
    assert found.fit.added_s["many_spilled"] == pytest.approx(known.added_s["many_spilled"], rel=0.1)
