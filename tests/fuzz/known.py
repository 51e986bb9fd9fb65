"""Failures that are known and not mended yet, so that new ones stand out. Empty when all is well."""

from __future__ import annotations

import re

#: (target, signature or message): regular expressions that are searched for.
KNOWN: tuple[tuple[str, str], ...] = ()


def known(target: str, signature: str, what: str) -> bool:
    """Whether the list has this failure."""
    return any(re.search(t, target) and (re.search(s, signature) or re.search(s, what)) for t, s in KNOWN)
