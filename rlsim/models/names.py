"""Names of the catalogue for what Hugging Face, or the path of a checkpoint, calls a model."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from rlsim.base import catalogue
from rlsim.base.reading import read_yaml

UNSEEN = "what it sees or hears, and the time that takes, is not represented"
#: What may follow the size in a model's name without changing its shape.
_SUFFIX = re.compile(r"(-(instruct|base|chat|hf|it|pt|sft|rl|dpo|merge|rm|preview|thinking|bf16|v?\d+(\.\d+)*|\d{4}))*")
#: The end of a checkpoint's path, below the name of its model.
_STEP = re.compile(r"(/(global_step_\d+|huggingface))+$")


class Known(NamedTuple):
    """A model of the catalogue, and what to say about taking it for a name ("" if nothing)."""

    model: str
    said: str


@cache
def _called_otherwise() -> tuple[dict[str, str], dict[str, str]]:
    """Published models by their names, each with the one of the catalogue whose shape it has, or its language model."""
    known, tables = catalogue.names("models"), read_yaml(catalogue.data_dir("models").parent / "known_names.yaml")
    same, language = (
        {name: shape for shape, names in tables[kind].items() for name in names}
        for kind in ("same_shape", "language_model")
    )
    same |= {f"nvidia-{name}": name for name in known if name.startswith("nemotron-")}
    return same, language | {name: name for name in known if name.startswith("qwen3.5-")}


def short_name(name: str) -> str:
    """The name of a model at the end of a path, or behind its publisher's."""
    return _STEP.sub("", name.rstrip("/")).rpartition("/")[2]


def known_shape(name: str) -> Known | None:
    """The model of the catalogue with the shape of `Qwen/Qwen3-8B`, or of a checkpoint's path; None if none is known
    to have it."""
    whole = short_name(name)
    last = whole.lower()
    same_shape, language_model = _called_otherwise()
    named = {**same_shape, **language_model, **{entry: entry for entry in catalogue.names("models")}}
    fitting = [entry for entry in named if last.startswith(entry) and _SUFFIX.fullmatch(last[len(entry) :])]
    if not fitting:
        return None
    chosen = named[max(fitting, key=len)]
    if max(fitting, key=len) in language_model:
        return Known(chosen, f"{whole} has a language model of this shape; {UNSEEN}")
    return Known(chosen, "" if chosen in (last, name.lower()) else f"{whole} has the shape of {chosen}")
