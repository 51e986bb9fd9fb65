"""Fits collectives across nodes to published nccl-tests, and writes what comes of it into docs/calibration.md.

    python scripts/fit_across.py

Prints the constants of `rlsim.cost.fits.ACROSS` that are fitted. Takes a minute.
"""

from __future__ import annotations

from pathlib import Path

from calibration.across import FITTED, across_section, fit, points

PAGE = Path(__file__).resolve().parents[1] / "docs" / "calibration.md"
HEAD = "## Across nodes\n"


def main() -> None:
    """Fit, print and write."""
    found = fit(points())
    print(", ".join(f"{name} {getattr(found, name):g}" for name in FITTED))
    before, _, rest = PAGE.read_text().partition(HEAD)
    after = rest[rest.index("\n## ") + 1 :] if "\n## " in rest else ""
    PAGE.write_text(before + across_section().strip() + "\n\n" + after)


if __name__ == "__main__":
    main()
