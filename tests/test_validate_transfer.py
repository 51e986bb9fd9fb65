"""Part `transfer` of the validation: each run under the fit that has not seen its setting, and the one that has."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsim.cost.calibration import FrontEndFit, HostFit, load_calibration
from rlsim.validate import transfer
from rlsim.validate.parts import Options
from rlsim.validate.serving import AISIMULATE, SERVED, TABLE, TODAY
from rlsim.validate.targets import load_targets
from rlsim.validate.transfer import SettingFit, TransferFits, kind_rows, read_runs, section, shipped_fits

QWEN = "Qwen/Qwen3-32B"
HEADINGS = "model,gpu,backend,backend_version,tp,prompt_tokens,response_tokens,concurrency,ttft_ms,tpot_ms"
SETTINGS = ("vllm/qwen3-32b/tp2", "vllm/qwen3-32b/tp8")


def fit(left_out: str, step_s: float, without: str = "") -> SettingFit:
    host = HostFit(step_s=step_s, sequence_s=0.0, source="test")
    return SettingFit(engine="vllm", left_out=left_out, without=without, host=host, front_end=FrontEndFit())


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> TransferFits:
    """Steps of 1 ms where all was seen, of 2 and 3 ms where TP2 and TP8 were not, of 9 ms without a term."""
    known = (fit("", 1e-3), fit(SETTINGS[0], 2e-3), fit(SETTINGS[1], 3e-3), fit(SETTINGS[0], 9e-3, "a term"))
    found = TransferFits(date="today", script="none", source="test", fits=known)
    monkeypatch.setattr(transfer, "shipped_fits", lambda: found)
    return found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / TABLE
    lines = [f"{QWEN},h100_sxm,vllm,1,{tp},64,8,{users},50,8" for tp in (2, 8) for users in (1, 2)]
    path.write_text("\n".join((HEADINGS, *lines)) + "\n", encoding="utf-8")
    more = f"{HEADINGS},gpu,precision,dp,ep,lengths".replace("model,gpu,", "model,")
    today = "llama-3.1-8b,vllm,0.18.0,1,64,8,2,50,8,h100-sxm,fp8,1,1,uniform"
    (tmp_path / TODAY).write_text(f"{more}\n{today}\n")
    (tmp_path / AISIMULATE).write_text(f"{more},of,peer_ttft_ms,peer_tpot_ms\n{today},today,75,6\n")
    return tmp_path


def test_each_setting_under_the_fit_that_has_not_seen_it(fits: TransferFits, data: Path) -> None:
    """One user: a step of decoding is its kernels and the host's time, so the fits differ by their steps."""
    runs = read_runs(data)
    left_out, fitted = (
        {row.case: row.simulated for row in kind_rows(runs, fits, kind) if row.quantity == "tpot_s"}
        for kind in ("left-out", "fitted")
    )
    for setting, later_s in zip(SETTINGS, (1e-3, 2e-3), strict=True):
        case = f"{setting}/64+8x1"
        assert left_out[case] - fitted[case] == pytest.approx(later_s, rel=1e-6)
    term = kind_rows(runs, fits, "left-out", "a term")
    assert {row.case.rpartition("/")[0] for row in term} == {SETTINGS[0]}, "only where there is such a fit"


def test_the_part_is_told_by_settings(fits: TransferFits, data: Path) -> None:
    found = section(Options(evidence=data))
    assert found.summarised
    told = [(s.group, s.quantity, s.kind, s.count) for s in found.summaries]
    assert (SETTINGS[1], "tpot_s", "left-out", 2) in told
    assert ("vllm", "ttft_s", "fitted", 4) in told
    (tp8,) = (s for s in found.summaries if s.group == SETTINGS[1] and s.quantity == "tpot_s" and s.kind == "left-out")
    errors = [
        r.error for r in found.rows if r.case.startswith(SETTINGS[1]) and r.quantity == "tpot_s" and r.kind == tp8.kind
    ]
    record = tp8.record()
    assert record["case"] == SETTINGS[1]
    assert record["error"] == pytest.approx(sum(map(abs, errors)) / 2, rel=1e-5)
    assert "| vllm | a term |" in found.tables["ablation"]
    (family,) = found.tables["families"].splitlines()[2:]
    assert family.startswith("| h100-sxm/vllm/llama-3.1-8b | 1 |")
    last = found.tables["peers"].splitlines()[-1].split(" | ")
    assert (last[0], last[1], last[3], last[5]) == ("| all", "1", "25.0% / 25.0%", "50.0% / 50.0% |")


def test_a_fit_that_leaves_nothing_out_says_so() -> None:
    """SGLang's fits have no host time, with a setting and without it."""
    rows = transfer.fits_table(shipped_fits()).splitlines()
    assert all(("leaves nothing out" in row) == row.startswith("| sglang/") for row in rows[2:])


def test_shipped_fits_are_those_of_the_calibrations_and_leave_out_every_tp() -> None:
    shipped = shipped_fits()
    for engine in SERVED:
        calibration, whole = load_calibration(f"h100-{engine}"), shipped.of(engine)
        ahead = engine in ("vllm", "trtllm")  # vLLM since 0.14, whose kernels these are
        assert calibration.host == whole.host.model_copy(update={"overlapped": ahead})
        assert calibration.front_end == whole.front_end
        left_out = {f.left_out for f in shipped.fits if f.engine == engine and f.left_out and not f.without}
        assert len(left_out) >= 2
        for term in shipped.terms(engine):
            assert {f.left_out for f in shipped.fits if f.engine == engine and f.without == term} == left_out
        for name, (low, high) in whole.intervals.items():
            value = getattr(whole.host if hasattr(whole.host, name) else whole.front_end, name)
            assert low <= value <= high
    with pytest.raises(KeyError):
        shipped.of("torch")


def test_a_left_out_setting_has_bounds() -> None:
    kinds = {bound.kind for bound in load_targets(Options().evidence).bounds if bound.part == "transfer"}
    assert kinds == {"left-out", "output"}
