"""`python -m rlsim.validate [--check] FILE`: write (or check) the page of published figures beside rlsim's."""

from __future__ import annotations

import sys
from pathlib import Path

from rlsim.validate.page import page


def main() -> int:
    """Write the page, or with --check say whether the file still is what would be written."""
    check = "--check" in sys.argv[1:]
    names = [name for name in sys.argv[1:] if name != "--check"]
    if len(names) != 1:
        sys.stderr.write("usage: python -m rlsim.validate [--check] FILE\n")
        return 2
    path, text = Path(names[0]), page()
    if not check:
        path.write_text(text, encoding="utf-8")
        return 0
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"{path} is stale; run: python -m rlsim.validate {path}\n")
    return 1


sys.exit(main())
