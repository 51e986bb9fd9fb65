"""Discrete-event cluster simulator for long-tail RLHF scheduling research."""

__version__ = "0.1.0"
