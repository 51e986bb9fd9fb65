"""The version of rlsim, which results and calibrations carry."""

__version__ = "0.2.0"
