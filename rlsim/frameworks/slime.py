"""`rlsim init --from-slime`: arguments of slime as an experiment, every value with where it is from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlsim.base.reading import is_file, read_text
from rlsim.errors import CatalogueError
from rlsim.frameworks.adapter import adapted
from rlsim.frameworks.draft import ASSUMED, Draft
from rlsim.frameworks.mapping import Reading
from rlsim.frameworks.names import find_model, node_gpus
from rlsim.frameworks.parts import Options
from rlsim.frameworks.settings import Settings, Unknown
from rlsim.frameworks.shell import Override
from rlsim.frameworks.sources import read_sources
from rlsim.frameworks.variables import Argument
from rlsim.models.hardware import load_cluster

_PROGRAM = re.compile(r"(?:.*/)?(train(?:_async)?\.py)")
_FLAG = re.compile(r"(?P<key>--[a-z][\w-]*|program)(?:[= ](?P<value>.*))?", re.DOTALL)
#: The end of a checkpoint's name that says how its weights are written, not which shape they have.
_WRITTEN = re.compile(r"-(fp8|int4|bf16)/?$", re.IGNORECASE)


def takes(found: list[Override], before: str, argument: Argument) -> bool:
    """See `rlsim.frameworks.shell.Takes`: behind train.py, or in a plain list, a flag and its values."""
    flag, program = _FLAG.fullmatch(argument.text), _PROGRAM.fullmatch(argument.text)
    if not found and program:
        found.append(Override("program", program[1], argument.line))
    elif (not found and before) or (not found and not flag) or "[@]" in argument.text:
        return False
    elif flag:
        found.append(Override(flag["key"], argument.unknown or flag["value"] or "", argument.line))
    elif not isinstance(found[-1].value, Unknown):
        value = argument.unknown or f"{found[-1].value} {argument.text}".strip()
        found[-1] = replace(found[-1], value=value)
    return True


def _given(text: str) -> Override | None:
    """A flag beside files, with or without its dashes."""
    flag = _FLAG.fullmatch(f"--{text}" if re.match(r"(?!program=)[a-z][a-z\d-]*=", text) else text)
    return Override(flag["key"], flag["value"] or "", 0) if flag else None


def from_slime(sources: Sequence[str], options: Options) -> Draft:
    """The experiment that slime's run scripts and arguments describe.

    Raises as `adapted`.
    """
    config = read_sources(sources, "slime", "--from-slime", "slime", takes, _given)
    _settle_node(config, options)
    _settle_fusion(config, sources)
    return adapted(Reading("slime", config), "sglang", options, sources, partial(_model, config, options))


def _settle_node(config: Settings, options: Options) -> None:
    """A script that counts the GPUs of the machine it is on has whole nodes here."""
    key, kind = config.key("per_node"), options.gpu
    if key not in config.doubts or not (kind or options.cluster):
        return
    found = load_cluster(options.cluster).gpus_per_node if options.cluster else node_gpus(kind or "")
    place, unknown = config.doubts.pop(key)
    give = f"; give {unknown.variable}=… if it is another" if unknown.variable else ""
    config.notes.append(f"{key} ({place}): {unknown.why}: {found}, a whole node, is taken{give}")
    config.put({key: found}, f"{ASSUMED}: a whole node")


def _settle_fusion(config: Settings, sources: Sequence[str]) -> None:
    """The arguments of a model (`scripts/models/…`) may say that its rotary embeddings are not fused."""
    folders = [folder / "models" for source in sources for folder in (*Path(source).parents,)[:2]]
    for file in (folder / f"{name}.sh" for folder in folders for name in config.sourced):
        if is_file(file) and "--no-rope-fusion" in read_text(file).split():
            config.put({"--no-rope-fusion": True}, f"models/{file.name}")


def _model(config: Settings, options: Options) -> str:
    """The checkpoint's name without how it is written, or, where that tells no shape, that of the model's arguments."""
    named = _WRITTEN.sub("", config.text("model"))
    for name in (named, *config.sourced):
        try:
            find_model(name, options.folder)
        except CatalogueError:
            continue
        return name
    return named
