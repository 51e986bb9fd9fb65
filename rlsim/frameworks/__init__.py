"""A configuration, run script or log of veRL, NeMo-RL or AReaL comes in; an experiment, or measured steps, go out.

What is known of a framework's keys, defaults and start conditions are rows of `data`; the files here are what the
readers share.
"""
