"""A configuration, run script or log of veRL, NeMo-RL, AReaL, slime or SkyRL comes in; an experiment, or steps, go out.

What is known of a framework's keys, defaults and start conditions are rows of `data`; the files here are what the
readers share.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsim.frameworks.draft import Draft
    from rlsim.frameworks.parts import Options

#: The modules that read configurations, each by a function `from_NAME`, by the names that options of `rlsim init` have.
READERS = {
    "verl": "rlsim.frameworks.verl.experiment",
    "nemo": "rlsim.frameworks.nemo",
    "areal": "rlsim.frameworks.areal",
    "slime": "rlsim.frameworks.slime",
    "skyrl": "rlsim.frameworks.skyrl",
}


def read(framework: str, sources: Sequence[str], options: Options, verl_version: str) -> Draft:
    """The draft of a configuration of one of `READERS`; of veRL with the defaults of that release."""
    reader: Any = getattr(import_module(READERS[framework]), f"from_{framework}")
    return reader(sources, options, *([verl_version] if framework == "verl" else []))  # type: ignore[no-any-return]
