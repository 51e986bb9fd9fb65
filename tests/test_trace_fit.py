"""Fitting: what is known is found again, the cap counts as censoring, and real traces are described well."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import DATA, cases

from rlsim.errors import ConfigError, TraceError
from rlsim.trace import Trace, TraceMeta, make_trace, read_trace
from rlsim.trace.fit import LengthFit, fit_lengths, fit_trace, ks_distance, load_fit, save_fit
from rlsim.trace.importers import import_trace
from rlsim.trace.mixture import Component, LengthModel, both_below, icc_log, mixture, straggling_groups, within_sd_log

REAL = DATA / "traces"
real = pytest.mark.skipif(not REAL.is_dir(), reason=f"the real traces are not beside this checkout ({REAL})")
TWO = LengthModel(
    components=(
        Component(weight=0.8, median_tokens=900, sigma=0.5, prompt_share=0.7),
        Component(weight=0.2, median_tokens=6000, sigma=0.6, prompt_share=0.3),
    ),
    runaway_share=0.6,
)


def drawn(model: LengthModel, prompts: int, responses: int, cap: int | None, seed: int = 0) -> Trace:
    lengths = model.draw(prompts, responses, 1, np.random.default_rng(seed))[0]
    tokens = np.clip(np.rint(lengths), 1, cap).astype(int)
    prompt, sample = np.indices(tokens.shape)
    frame = pd.DataFrame({"prompt_id": prompt.ravel(), "sample_id": sample.ravel(), "response_tokens": tokens.ravel()})
    return make_trace(frame, TraceMeta(name="drawn", cap_tokens=cap))


def test_a_known_mixture_is_found_again() -> None:
    fit = fit_trace(drawn(TWO, 1500, 8, cap=12_000)).model
    for got, true in zip(fit.components, TWO.components, strict=True):
        assert got.weight == pytest.approx(true.weight, abs=0.02)
        assert got.median_tokens == pytest.approx(true.median_tokens, rel=0.04)
        assert got.sigma == pytest.approx(true.sigma, rel=0.06)
        assert got.prompt_share == pytest.approx(true.prompt_share, abs=0.08)
    assert fit.runaway_share == pytest.approx(TWO.runaway_share, abs=0.08)
    assert fit.icc() == pytest.approx(TWO.icc(), abs=0.03)


def test_censored_lengths_are_not_taken_as_observed() -> None:
    from scipy import stats

    rng = np.random.default_rng(5)
    true = np.exp(rng.normal(np.log(3000), 1.0, 20_000))
    cap = 8192
    tokens, cut = np.minimum(np.rint(true), cap).astype(np.int64), true >= cap
    naive, censored = fit_lengths(tokens, np.zeros_like(cut), 1), fit_lengths(tokens, cut, 1)
    right = true.mean()
    assert censored.mean() == pytest.approx(right, rel=0.015)
    assert naive.mean() < 0.85 * right
    data = stats.CensoredData.right_censored(np.log(tokens), cut)
    mu, sigma = stats.norm.fit(data)
    assert censored.mu[0] == pytest.approx(mu, abs=2e-3)
    assert censored.sigma[0] == pytest.approx(sigma, abs=2e-3)


def test_correlation_in_closed_form_matches_a_draw() -> None:
    trace = drawn(TWO, 6000, 8, cap=None)
    measured = icc_log(trace.response_tokens, trace.prompt_codes()[0])
    assert measured == pytest.approx(TWO.icc(), abs=0.02)
    assert TWO.with_icc(0.5).icc() == pytest.approx(0.5, abs=1e-4)
    assert TWO.with_icc(0.0).icc() == pytest.approx(0, abs=1e-12)


def test_both_below_against_scipy() -> None:
    from scipy.stats import multivariate_normal

    for x, y, r in [(0.3, -1.0, 0.5), (2.0, 1.5, 0.9), (-1.0, -1.2, 0.0), (0.5, 0.5, 0.98)]:
        expected = multivariate_normal.cdf([x, y], cov=[[1, r], [r, 1]])
        assert both_below(x, y, r) == pytest.approx(float(expected), abs=1e-5)
    p = np.array([0.001, 0.05, 0.5, 0.9, 0.9999])
    assert np.allclose(TWO.cdf(TWO.quantile(p)), p, atol=1e-9)
    assert mixture([1.0], [np.log(100)], [0.5]).mean() == pytest.approx(100 * np.exp(0.125))
    x = TWO.quantile((np.arange(200_000) + 0.5) / 200_000)
    assert TWO.mean(8192) == pytest.approx(np.minimum(x, 8192).mean(), rel=1e-4)


def test_icc_estimator_by_hand() -> None:
    # Two prompts of two: means 1 and 3 (log), within ±1: MSB = 4, MSW = 2, so ICC = (4 − 2) / (4 + 2).
    tokens = np.exp([0.0, 2.0, 2.0, 4.0])
    codes = np.array([0, 0, 1, 1])
    assert icc_log(tokens, codes) == pytest.approx(1 / 3)
    assert within_sd_log(tokens, codes) == pytest.approx(np.sqrt(2))
    assert icc_log(tokens, np.arange(4)) is None
    assert straggling_groups(np.array([1, 9, 1, 1]), codes, 9) == (0.5, 1 - 0.75**2)


def test_too_little_to_fit() -> None:
    with pytest.raises(TraceError, match="at least 20 responses"):
        fit_trace(drawn(TWO, 5, 2, cap=None))
    same = make_trace(
        pd.DataFrame({"prompt_id": range(50), "sample_id": 0, "response_tokens": 7}), TraceMeta(name="same")
    )
    with pytest.raises(TraceError, match="of different lengths"):
        fit_trace(same)
    fit = fit_trace(drawn(TWO, 3000, 1, cap=None))
    assert fit.model.icc() == pytest.approx(0, abs=1e-12)
    assert fit.goodness.icc_trace is None
    assert "one sample" in fit.notes[0]


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_fit_is_read_back_as_written(tmp_path: Path, suffix: str) -> None:
    fit = fit_trace(drawn(TWO, 200, 4, cap=4096))
    path = tmp_path / f"fit{suffix}"
    save_fit(fit, path)
    assert load_fit(path) == fit
    with pytest.raises(TraceError, match=r"written as \.yaml or \.json"):
        save_fit(fit, tmp_path / "fit.txt")
    broken = json.loads(fit.model_dump_json())
    broken["model"]["components"][0]["weight"] = 0.1
    (tmp_path / "b.json").write_text(json.dumps(broken))
    with pytest.raises(ConfigError, match="the weights of the components add up to"):
        load_fit(tmp_path / "b.json")


@cache
def fitted(file: str) -> LengthFit:
    return fit_trace(import_trace(REAL / file))


@real
@cases("trace_files", "real traces are fitted better by two lognormals")
def test_real_traces_are_fitted_better_by_two_lognormals(file: str, ks: float, better: float) -> None:
    good = fitted(file).goodness
    assert good.ks < ks
    assert good.ks * better < good.ks_single_lognormal
    if good.icc_trace is not None:
        assert good.icc_fit == pytest.approx(good.icc_trace, abs=0.03)
        assert good.within_sd_fit == pytest.approx(good.within_sd_trace, rel=0.05)
        assert good.straggling_prompts_fit == pytest.approx(good.straggling_prompts_trace, rel=0.15)


@real
def test_aime8_has_the_correlation_it_is_known_for() -> None:
    trace, fit = read_trace(REAL / "aime8_r1distill1.5b.parquet"), fitted("aime8_r1distill1.5b.parquet")
    assert trace.meta.cap_tokens == 16_000
    assert trace.capped.mean() == pytest.approx(0.0222, abs=0.0005)
    assert icc_log(trace.response_tokens, trace.prompt_codes()[0]) == pytest.approx(0.63, abs=0.005)
    assert fit.goodness.share_at_cap_fit == pytest.approx(0.0222, abs=0.003)
    assert ks_distance(fit.model, trace.response_tokens, trace.capped) == pytest.approx(fit.goodness.ks, abs=1e-5)
