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
from functools import partial
from pathlib import Path

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


def is_verl(script: Path) -> bool:
    """Whether a command of the script sets keys of veRL's RL trainers, and does not merely generate."""
    try:
        found = read_script(script.read_text(errors="replace"), str(script), {}, takes)
    except RlsimError:
        return True  # and refused
    sets = any(override.key.startswith("actor_rollout_ref.") for override in found.overrides)
    return sets and "main_generation" not in found.program


def is_slime(script: Path) -> bool:
    """Whether a script gives slime a batch of rollouts, and no supervised loss."""
    text = script.read_text(errors="replace")
    return "--rollout-batch-size" in text and "sft_loss" not in text


def has(file: Path, section: str) -> bool:
    """Whether a YAML file, with what it inherits from, has that section."""
    try:
        return read_sources([str(file)], "", "").has(section)
    except RlsimError:
        return False


#: How the files of a framework's configurations end, which of them train by RL, and what reads them.
FRAMEWORKS: dict[str, tuple[str, Callable[[Path], bool], Callable[[Sequence[str], Options], Draft]]] = {
    "verl": ("sh", is_verl, from_verl),
    "nemo": ("yaml", partial(has, section="grpo"), from_nemo),
    "areal": ("yaml", partial(has, section="gconfig"), from_areal),
    "slime": ("sh", is_slime, from_slime),
}


def main() -> None:
    """Count, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--list", action="store_true", help="print what becomes of each")
    arguments = parser.parse_args()
    (ending, is_rl, read), counts = FRAMEWORKS[arguments.framework], collections.Counter[str]()
    for file in sorted(path for folder in arguments.folders for path in folder.rglob(f"*.{ending}")):
        kind, why = "no RL training: no settings of it, supervised fine-tuning, evaluation, generation alone", ""
        if is_rl(file):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    why = check(read([str(file)], Options(Path(folder), arguments.gpu)), Path(folder)) or ""
                    kind = "does not fit" if why else "runs"
                except RlsimError as error:
                    kind, why = "refused", str(error)
        counts[kind] += 1
        if arguments.list:
            print(f"{kind}\t{file}\t{why.replace(chr(10), ' ')}", flush=True)
    for kind, count in counts.most_common():
        print(f"{count:4d} {kind}")


if __name__ == "__main__":
    main()
