"""Counts of how many of a framework's configurations `rlsim init` makes an experiment; docs/from-verl.md has veRL's.

    python scripts/count_configurations.py verl VERL VERL_RECIPE [--gpu h100] [--list]
    python scripts/count_configurations.py nemo NEMO_RL/examples/configs
    python scripts/count_configurations.py areal AREAL/examples
    python scripts/count_configurations.py slime SLIME/scripts SLIME/examples

The folders are of checkouts of github.com/verl-project/verl and verl-recipe, NVIDIA-NeMo/RL, inclusionAI/AReaL and
THUDM/slime. Counted are the shell scripts that have settings of veRL's RL trainers, or a batch of slime's rollouts and
no supervised loss, and the YAML files with a section `grpo` (NeMo-RL) or `gconfig` (AReaL); what does not fit is
written too, and says so. --list prints what becomes of each.
"""

from __future__ import annotations

import argparse
import collections
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rlsim.errors import RlsimError
from rlsim.frameworks.areal import from_areal
from rlsim.frameworks.draft import Draft
from rlsim.frameworks.nemo import from_nemo
from rlsim.frameworks.parts import Options, check
from rlsim.frameworks.shell import read_script
from rlsim.frameworks.slime import from_slime
from rlsim.frameworks.sources import read_sources
from rlsim.frameworks.verl.config import takes
from rlsim.frameworks.verl.experiment import from_verl


class Framework(NamedTuple):
    """Where its configurations are, which of them train by RL, and what reads them."""

    ending: str
    is_rl: Callable[[Path], bool]
    read: Callable[[Sequence[str], Options], Draft]


def is_verl(script: Path) -> bool:
    """Whether a command of the script sets keys of veRL's RL trainers, and does not merely generate."""
    try:
        found = read_script(script.read_text(errors="replace"), str(script), {}, takes)
    except RlsimError:
        return True  # and refused
    keys = [override.key for override in found.overrides]
    return any(key.startswith("actor_rollout_ref.") for key in keys) and "main_generation" not in found.program


def is_slime(script: Path) -> bool:
    """Whether a script gives slime a batch of rollouts, and no supervised loss."""
    text = script.read_text(errors="replace")
    return "--rollout-batch-size" in text and "sft_loss" not in text


def has(*keys: str) -> Callable[[Path], bool]:
    """Whether a YAML file, with what it inherits from, has one of these sections."""

    def found(file: Path) -> bool:
        try:
            config = read_sources([str(file)], "", "")
        except RlsimError:
            return False
        return any(config.has(key) for key in keys)

    return found


FRAMEWORKS = {
    "verl": Framework("sh", is_verl, from_verl),
    "nemo": Framework("yaml", has("grpo"), from_nemo),
    "areal": Framework("yaml", has("gconfig"), from_areal),
    "slime": Framework("sh", is_slime, from_slime),
}


def outcome(framework: Framework, file: Path, gpu: str) -> tuple[str, str]:
    """What becomes of a configuration: `runs`, `does not fit` or `refused`, and why."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            draft = framework.read([str(file)], Options(Path(folder), gpu))
        except RlsimError as error:
            return "refused", str(error)
        problem = check(draft, Path(folder))
    return ("does not fit", problem) if problem else ("runs", "")


def main() -> None:
    """Count, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--list", action="store_true", help="print what becomes of each")
    arguments = parser.parse_args()
    framework, counts = FRAMEWORKS[arguments.framework], collections.Counter[str]()
    for file in sorted(path for folder in arguments.folders for path in folder.rglob(f"*.{framework.ending}")):
        if not framework.is_rl(file):
            counts["no RL training: no settings of it, supervised fine-tuning, evaluation, generation alone"] += 1
            continue
        kind, why = outcome(framework, file, arguments.gpu)
        counts[kind] += 1
        if arguments.list:
            print(f"{kind}\t{file}\t{why.replace(chr(10), ' ')}", flush=True)
    for kind, count in counts.most_common():
        print(f"{count:4d} {kind}")


if __name__ == "__main__":
    main()
