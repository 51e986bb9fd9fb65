"""`rlsim init`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlsim.cli import complete
from rlsim.cli.common import echo, named

if TYPE_CHECKING:
    from rlsim.frameworks.draft import Draft


FromVerl = Annotated[
    list[str] | None,
    typer.Option(
        "--from-verl",
        metavar="CONFIG",
        help="A veRL configuration: YAML, a run's folder, a run_*.sh, a log; or KEY=VALUE, or NAME=VALUE of a "
        "script's variable. Repeatable, later ones win.",
    ),
]
FromNemo = Annotated[
    list[str] | None,
    typer.Option(
        "--from-nemo",
        metavar="CONFIG",
        help="A NeMo-RL configuration of GRPO: YAML, with the files that its `defaults` name beside it; or KEY=VALUE. "
        "Repeatable, later ones win.",
    ),
]
FromAreal = Annotated[
    list[str] | None,
    typer.Option(
        "--from-areal",
        metavar="CONFIG",
        help="An AReaL configuration of GRPO or PPO: YAML; or KEY=VALUE. Repeatable, later ones win.",
    ),
]
FromSlime = Annotated[
    list[str] | None,
    typer.Option(
        "--from-slime",
        metavar="CONFIG",
        help="slime: a run-*.sh, or a file of its flags; or --FLAG=VALUE, or NAME=VALUE of a script's variable. "
        "Repeatable, later ones win.",
    ),
]
GpuLike = Annotated[
    str | None,
    typer.Option(
        metavar="GPU,FIGURES",
        help="GPU of the catalogue that yours is like, then its memory, bandwidth and dense bf16 rate as they differ: "
        "h100,48GB,864GB/s,362TFLOP/s.",
    ),
]
Network = Annotated[
    str | None, typer.Option(metavar="RATE", help="Network of a node, all its ports together: 100Gb/s.")
]
Nccl = Annotated[
    list[Path] | None,
    typer.Option(help="Output of nccl-tests on your machines: fits a calibration beside the experiment."),
]


def init(
    name: Annotated[
        str | None, typer.Argument(help="Name of the experiment (default: experiment, or the configuration's).")
    ] = None,
    from_verl: FromVerl = None,
    from_nemo: FromNemo = None,
    from_areal: FromAreal = None,
    from_slime: FromSlime = None,
    gpu: Annotated[
        str | None, named("GPU of the catalogue, such as h100; configurations name none.", complete.gpus)
    ] = None,
    gpu_like: GpuLike = None,
    network: Network = None,
    cluster: Annotated[
        str | None, named("Cluster of the catalogue or .yaml, instead of --gpu.", complete.clusters)
    ] = None,
    model: Annotated[
        str | None, named("Model of the catalogue, or the path of a config.json.", complete.models)
    ] = None,
    reward_model: Annotated[str | None, named("The same of veRL's reward model.", complete.models)] = None,
    trace: Annotated[
        str | None, named("Trace of response lengths (default: the nearest shipped).", complete.traces)
    ] = None,
    calibration: Annotated[
        str | None, named("Calibration (default: of the GPU and engine).", complete.calibrations)
    ] = None,
    nccl: Nccl = None,
    verl_version: Annotated[str, named("veRL release whose defaults hold.", complete.verl_versions)] = "0.9",
    out: Annotated[Path | None, typer.Option(help="File to write (default: NAME.yaml).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write an experiment file: a commented starter, or what veRL, NeMo-RL, AReaL or slime is configured to do.

    \b
    Example: rlsim init my-first
    Example: rlsim init --from-verl run_qwen2.5-7b.sh --gpu h100
    Example: rlsim init --from-nemo grpo.yaml --gpu h100
    Example: rlsim init --from-slime run-qwen3-4B.sh --gpu h100
    Example: rlsim init mine --model mine/config.json --cluster 8xh100 --nccl all_reduce.txt
    """
    from rlsim.cli.starter import starter
    from rlsim.frameworks import read
    from rlsim.frameworks.draft import check_free
    from rlsim.frameworks.parts import Options, likeness

    folder = out.parent if out is not None else Path()
    sources = {"--from-verl": from_verl, "--from-nemo": from_nemo, "--from-areal": from_areal,
               "--from-slime": from_slime}  # fmt: skip
    frameworks = [option for option, texts in sources.items() if texts]
    _check_used(frameworks, reward_model, gpu or gpu_like or network)
    kind, described = likeness(gpu, gpu_like)
    if frameworks:
        options = Options(folder, kind, cluster, model, reward_model, calibration, trace, name, described, network)
        option = frameworks[0]
        draft = read(option.removeprefix("--from-"), sources[option] or [], options, verl_version)
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


def _check_used(frameworks: list[str], reward_model: str | None, gpu: str | None) -> None:
    from rlsim.errors import ConfigError

    if len(frameworks) > 1:
        raise ConfigError(f"{' and '.join(frameworks)}: an experiment is of one configuration; give one of them")
    if reward_model is not None and frameworks != ["--from-verl"]:
        raise ConfigError("--reward-model goes with --from-verl")
    if gpu is not None and not frameworks:
        raise ConfigError("--gpu goes with --from-verl, or another configuration: give --cluster")


def _calibrate(draft: Draft, nccl: list[Path], cluster: str | None, folder: Path) -> None:
    """Give the experiment a calibration of its own, with the collectives of these outputs of nccl-tests."""
    from rlsim.cli.starter import CLUSTER, calibration_from_nccl
    from rlsim.frameworks.draft import Entry
    from rlsim.models.hardware import load_cluster

    data = draft.data()
    base, machines = str(data["calibration"]), load_cluster(cluster or CLUSTER)
    fitted = calibration_from_nccl(nccl, machines=machines, base=base, name=str(data["name"]), folder=folder)
    draft.entries["calibration"] = Entry(fitted, f"collectives of {', '.join(map(str, nccl))}; the rest of {base}")


def _write(draft: Draft, target: Path, folder: Path, force: bool) -> None:
    """Write the file and say what is to know about it; exit code 1 if it does not run as it stands."""
    from rlsim.cli.terminal import Console
    from rlsim.frameworks.parts import check

    warnings: list[str] = []
    refused = check(draft, folder, warnings)
    if refused:
        draft.notes.insert(0, f"DOES NOT RUN AS IT STANDS: {refused}")
    draft.write(target, force=force)
    console = Console(soft_wrap=True)
    for note in [*draft.notes[bool(refused) :], *warnings]:
        console.print(f"note: {note}", style="dim")
    assumed = draft.data()["sources"].get("assumed", [])
    if assumed:
        console.print(f"assumed: {', '.join(assumed)}: rlsim run says over what range", style="dim")
    for item in draft.missing:
        console.print(f"not represented: {item}", style="dim")
    console.print(f"wrote {target}")
    if refused:
        echo(f"rlsim: {target} does not run as it stands: {refused}", err=True)
        raise typer.Exit(1)
    console.print(f"run it: rlsim run {target}")
