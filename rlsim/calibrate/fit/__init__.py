"""Fits: the few constants of each kind of kernel through its measured times, with held-out errors."""
