"""Fits what engines keep beside weights and KV cache to published logs; writes errors into docs/calibration.md.

    python scripts/fit_kv.py

Prints the fitted constants of `rlsim.cost.engine_memory`. Takes seconds.
"""

from __future__ import annotations

from pathlib import Path

from calibration.kv import fit, kv_section, logs

PAGE = Path(__file__).resolve().parents[1] / "docs" / "calibration.md"
HEAD = "## KV cache\n"


def main() -> None:
    """Fit, print and write."""
    print(fit(logs()))
    before, _, rest = PAGE.read_text().partition(HEAD)
    after = rest[rest.index("\n## ") + 1 :] if "\n## " in rest else ""
    PAGE.write_text(before.rstrip() + "\n\n" + kv_section().strip() + "\n" + ("\n" + after if after else ""))


if __name__ == "__main__":
    main()
