"""Counts of how many of veRL's run scripts `rlsim init --from-verl SCRIPT` makes an experiment (docs/from-verl.md).

    python scripts/count_verl_scripts.py VERL VERL_RECIPE [--gpu h100] [--list]

VERL and VERL_RECIPE are checkouts of github.com/verl-project/verl and verl-recipe. Counted are the shell scripts that
have settings of veRL's RL trainers; what does not fit is written too, and says so. --list prints what becomes of each.
"""

from __future__ import annotations

import argparse
import collections
import tempfile
from pathlib import Path

from rlsim.errors import RlsimError
from rlsim.init.parts import Options, check
from rlsim.verl.experiment import from_verl
from rlsim.verl.shell import read_script


def is_rl(script: Path) -> bool:
    """Whether a command of the script sets keys of veRL's RL trainers, and does not merely generate."""
    try:
        found = read_script(script.read_text(errors="replace"), str(script), {})
    except RlsimError:
        return True  # and refused
    keys = [override.key for override in found.overrides]
    return any(key.startswith("actor_rollout_ref.") for key in keys) and "main_generation" not in found.program


def outcome(script: Path, gpu: str) -> tuple[str, str]:
    """What becomes of a script: `runs`, `does not fit` or `refused`, and why."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            draft = from_verl([str(script)], Options(Path(folder), gpu))
        except RlsimError as error:
            return "refused", str(error)
        problem = check(draft, Path(folder))
    return ("does not fit", problem) if problem else ("runs", "")


def main() -> None:
    """Count, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--list", action="store_true", help="print what becomes of each script")
    arguments = parser.parse_args()
    counts = collections.Counter[str]()
    for script in sorted(path for folder in arguments.folders for path in folder.rglob("*.sh")):
        if not is_rl(script):
            counts["no RL training: no settings, supervised fine-tuning, evaluation, generation alone"] += 1
            continue
        kind, why = outcome(script, arguments.gpu)
        counts[kind] += 1
        if arguments.list:
            print(f"{kind}\t{script}\t{why.replace(chr(10), ' ')}", flush=True)
    for kind, count in counts.most_common():
        print(f"{count:4d} {kind}")


if __name__ == "__main__":
    main()
