"""`rlsim init --from-nemo`: a GRPO configuration of NeMo-RL."""

from __future__ import annotations

from collections.abc import Sequence

from rlsim.frameworks.adapter import adapted
from rlsim.frameworks.draft import Draft
from rlsim.frameworks.mapping import Reading
from rlsim.frameworks.parts import Options
from rlsim.frameworks.sources import read_sources


def from_nemo(sources: Sequence[str], options: Options) -> Draft:
    """The experiment that NeMo-RL's YAML files and overrides describe; raises as `adapted`."""
    config = read_sources(sources, "NeMo-RL", "--from-nemo", "nemo")
    reading = Reading("nemo", config)
    reading.refuse()
    return adapted(reading, config.text("backend"), options, sources)
