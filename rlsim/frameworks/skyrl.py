"""`rlsim init --from-skyrl`: settings of SkyRL as an experiment, every value with where it is from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlsim.frameworks.adapter import adapted
from rlsim.frameworks.draft import Draft
from rlsim.frameworks.mapping import Reading, default_values
from rlsim.frameworks.parts import Options
from rlsim.frameworks.settings import Settings
from rlsim.frameworks.shell import Override
from rlsim.frameworks.sources import override_of, read_sources
from rlsim.frameworks.variables import Argument

_ROOTS = ("trainer.", "generator.", "environment.", "data.")
_ENGINE = "generator.inference_engine."
#: The last release that takes the keys of before.
_OLD = "0.2"


def _given(text: str) -> Override | None:
    """A setting of SkyRL's, whose keys have dots; other names are a script's."""
    override = override_of(text)
    return override if override and override.key.startswith(_ROOTS) else None


def takes(found: list[Override], before: str, argument: Argument) -> bool:  # noqa: ARG001
    """See `rlsim.frameworks.shell.Takes`: each override is one word."""
    override = _given(argument.text)
    found += [replace(override, value=argument.unknown or override.value, line=argument.line)] if override else []
    return override is not None


def from_skyrl(sources: Sequence[str], options: Options) -> Draft:
    """The experiment that SkyRL's run scripts, YAML files and overrides describe.

    Raises as `adapted`.
    """
    config = read_sources(sources, "SkyRL", "--from-skyrl", "skyrl", takes, _given)
    _settle_release(config)
    return adapted(Reading("skyrl", config, program=config.text("program")), "vllm", options, sources)


def _settle_release(config: Settings) -> None:
    """Keys of before today's layout have the defaults of the last release that takes them."""
    old = [key for key in config.given if key.startswith(("generator.num_inf", "generator.inference_engine_"))]
    if old:
        config.program = f"SkyRL {_OLD}"
        config.default = dict(default_values("skyrl", _OLD))
        config.notes.append(f"{old[0]} ({config.origin[old[0]]}): of a layout that releases up to {_OLD} take; their "
                            f"defaults hold, and rlsim tune names keys as today ({_ENGINE}…)")  # fmt: skip
