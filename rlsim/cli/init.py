"""`rlsim init`."""

from __future__ import annotations

from pathlib import Path

import typer

from rlsim.base.reading import is_file
from rlsim.base.refusals import refuse
from rlsim.cli.common import echo, say, say_notes
from rlsim.errors import ConfigError
from rlsim.frameworks import read
from rlsim.frameworks.draft import Draft, Entry, check_free


def init(
    name: str | None = None,
    from_verl: list[str] | None = None,
    from_nemo: list[str] | None = None,
    from_areal: list[str] | None = None,
    from_slime: list[str] | None = None,
    from_skyrl: list[str] | None = None,
    gpu: str | None = None,
    gpu_like: str | None = None,
    network: str | None = None,
    cluster: str | None = None,
    model: str | None = None,
    reward_model: str | None = None,
    trace: str | None = None,
    calibration: str | None = None,
    nccl: list[Path] | None = None,
    verl_version: str = "0.9",
    out: Path | None = None,
    force: bool = False,
) -> None:
    """Write an experiment file: a commented starter, or what veRL, NeMo-RL, AReaL, slime or SkyRL is configured to do.

    \b
    Example: rlsim init my-first
    Example: rlsim init --from-verl run_qwen2.5-7b.sh --gpu h100
    Example: rlsim init --from-nemo grpo.yaml --gpu h100
    Example: rlsim init --from-slime run-qwen3-4B.sh --gpu h100
    Example: rlsim init mine --model mine/config.json --cluster 8xh100 --nccl all_reduce.txt
    """
    from rlsim.cli.starter import starter
    from rlsim.experiment.load import unread
    from rlsim.frameworks.parts import Options

    folder = out.parent if out is not None else Path()
    sources = {"--from-verl": from_verl, "--from-nemo": from_nemo, "--from-areal": from_areal,
               "--from-slime": from_slime, "--from-skyrl": from_skyrl}  # fmt: skip
    frameworks = [option for option, texts in sources.items() if texts]
    machine, behind = gpu or gpu_like or network, name and ("=" in name or is_file(name))
    refuse("rlsim init", frameworks=frameworks, reward=reward_model, gpu=machine, name=name, behind=behind)
    if frameworks:
        options = Options.of(
            folder, gpu, gpu_like, cluster=cluster, model=model, reward_model=reward_model, calibration=calibration,
            trace=trace, name=name, network=network,
        )  # fmt: skip
        option = frameworks[0]
        texts = sources[option] or []
        if of := next(filter(None, (unread(Path(text)) for text in texts)), ""):
            raise ConfigError(f"{option} {of}")
        draft = read(option.removeprefix("--from-"), texts, options, verl_version)
    else:
        draft = starter(
            name or "experiment", folder=folder, cluster=cluster, model=model, trace=trace, calibration=calibration
        )
    data = draft.data()
    target = out or Path(f"{data['name']}.yaml")
    check_free(target, force)
    if nccl:
        _calibrate(draft, nccl, data["cluster"] if frameworks else cluster, folder)
    _write(draft, target, folder, force)


def _calibrate(draft: Draft, nccl: list[Path], cluster: str | None, folder: Path) -> None:
    """Give the experiment a calibration of its own, with the collectives of these outputs of nccl-tests."""
    from rlsim.calibrate.importers import import_calibration
    from rlsim.cli.starter import CLUSTER
    from rlsim.cost.calibration import load_calibration
    from rlsim.frameworks.names import check_calibration
    from rlsim.models.hardware import load_cluster

    data = draft.data()
    base, machines = str(data["calibration"]), load_cluster(cluster or CLUSTER)
    check_calibration(base, machines, folder)
    engine, name = load_calibration(base).engine, f"{data['name']}-calibration"
    path = import_calibration("nccl-tests", nccl, gpu=machines, engine=engine, base=base, name=name, out=folder)
    draft.entries["calibration"] = Entry(path.name, f"collectives of {', '.join(map(str, nccl))}; the rest of {base}")


def _write(draft: Draft, target: Path, folder: Path, force: bool) -> None:
    from rlsim.frameworks.parts import check

    warnings: list[str] = []
    refused = check(draft, folder, warnings)
    if refused:
        draft.notes.insert(0, f"DOES NOT RUN AS IT STANDS: {refused}")
    draft.write(target, force=force)
    say_notes([*draft.notes[bool(refused) :], *warnings])
    assumed = draft.data()["sources"].get("assumed", [])
    if assumed:
        say(f"assumed: {', '.join(assumed)}: rlsim run says over what range", "dim")
    for item in draft.missing:
        say(f"not represented: {item}", "dim")
    say(f"wrote {target}")
    if refused:
        echo(f"rlsim: {target} does not run as it stands: {refused}", err=True)
        raise typer.Exit(1)
    say(f"run it: rlsim run {target}")
