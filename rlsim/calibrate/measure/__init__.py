"""Microbenchmarks: real kernels timed on this machine's devices, kept in a journal that survives interruption."""
