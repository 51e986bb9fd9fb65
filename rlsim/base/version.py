"""The version of rlsim, which results and calibrations carry, and how versions compare."""

__version__ = "0.2.0"


def numbers_of(release: str) -> tuple[int, ...]:
    """A release as numbers that compare."""
    return tuple(int(part) for part in release.split(".") if part)
