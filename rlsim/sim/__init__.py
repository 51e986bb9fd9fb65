"""Requests, step costs and decisions come in; what happened, and when, goes out.

The clock: replicas, rollouts, calls, GPUs, rewards and the recorder. SimPy lives here and only here; no policy is known
by name.
"""
