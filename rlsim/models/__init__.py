"""A name or a `config.json` comes in; a model as layers, or a cluster of GPUs, goes out.

Families of models are rows of `data/families.yaml`; `layers` have the weights, work and cache of each kind of layer.
"""
