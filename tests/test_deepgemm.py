"""DeepGEMM's products on Hopper: the blocks it chooses, their time by hand, and the fit to rows that follow it."""

import numpy as np
import pandas as pd
import pytest

from rlsim.calibrate.fit.gemm import kernel_gemm
from rlsim.cost.calibration import Reference, load_calibration
from rlsim.cost.deepgemm import KINDS, Block, blocks_of, choose, quantising_blocks
from rlsim.cost.fits import ProductFit
from rlsim.cost.operators import Operators
from rlsim.cost.products import Products

H100 = load_calibration("h100-sglang")
REFERENCE = Reference(
    bf16_flop_per_s=500e12,
    fp8_flop_per_s=1000e12,
    memory_bytes_per_s=1e15,
    sm_count=100,
    l2_bytes=40e6,
    link_bytes_per_s=100e9,
)
SPILLED_S = 2e-6
FIT = ProductFit(
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
        "many_spilled": SPILLED_S,
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


def test_blocks_share_loads_only_on_an_even_number_of_sms() -> None:
    assert any(block.multicast for _, block in blocks_of(4096, 132))
    assert not any(block.multicast for _, block in blocks_of(4096, 131))


def test_groups_are_quantised_together_by_the_power_of_two_that_divides_them() -> None:
    assert [quantising_blocks(m, 768) for m in (1, 2, 8, 16, 17)] == [3, 3, 3, 6, 51]
    assert quantising_blocks(4.3, 1024) == quantising_blocks(5, 1024) == 5


def test_time_by_hand() -> None:
    products = Products(FIT, REFERENCE)
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
