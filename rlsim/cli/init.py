"""`rlsim init`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlsim.cli import complete
from rlsim.cli.common import echo

if TYPE_CHECKING:
    from rlsim.init.draft import Draft


def init(
    name: Annotated[str | None, typer.Argument(help="Name of the experiment (default: experiment, or veRL's).")] = None,
    from_verl: Annotated[
        list[str] | None,
        typer.Option(
            "--from-verl",
            metavar="CONFIG",
            help="A veRL configuration: YAML, a run's folder, a run_*.sh, a log; or KEY=VALUE, or NAME=VALUE of a "
            "script's variable. Repeatable, later ones win.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="GPU of the catalogue, such as h100; veRL names none.", autocompletion=complete.gpus),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Cluster of the catalogue or .yaml, instead of --gpu.", autocompletion=complete.clusters),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model of the catalogue, or the path of a config.json.", autocompletion=complete.models),
    ] = None,
    reward_model: Annotated[
        str | None, typer.Option(help="The same of veRL's reward model.", autocompletion=complete.models)
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(help="Trace of response lengths (default: the nearest shipped).", autocompletion=complete.traces),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(help="Calibration (default: of the GPU and engine).", autocompletion=complete.calibrations),
    ] = None,
    nccl: Annotated[
        list[Path] | None,
        typer.Option(help="Output of nccl-tests on your machines: fits a calibration beside the experiment."),
    ] = None,
    verl_version: Annotated[
        str, typer.Option(help="veRL release whose defaults hold.", autocompletion=complete.verl_versions)
    ] = "0.9",
    out: Annotated[Path | None, typer.Option(help="File to write (default: NAME.yaml).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write an experiment file: a commented starter, or what a veRL configuration describes.

    \b
    Example: rlsim init my-first
    Example: rlsim init --from-verl run_qwen2.5-7b.sh --gpu h100
    Example: rlsim init mine --model mine/config.json --cluster 8xh100 --nccl all_reduce.txt
    """
    from rlsim.errors import ConfigError
    from rlsim.hardware import load_cluster
    from rlsim.init.draft import Entry, check_free
    from rlsim.init.starter import CLUSTER, calibration_from_nccl, starter
    from rlsim.verl.defaults import release
    from rlsim.verl.experiment import check
    from rlsim.verl.experiment import from_verl as draft_from_verl

    folder = out.parent if out is not None else Path()
    if from_verl:
        draft = draft_from_verl(
            from_verl,
            folder=folder,
            gpu=gpu,
            cluster=cluster,
            model=model,
            reward_model=reward_model,
            calibration=calibration,
            trace=trace,
            name=name,
            version=release(verl_version),
        )
    else:
        for option, value in (("--reward-model", reward_model), ("--gpu", gpu)):
            if value is not None:
                raise ConfigError(f"{option} goes with --from-verl" + (": give --cluster" if option == "--gpu" else ""))
        draft = starter(
            name or "experiment", folder=folder, cluster=cluster, model=model, trace=trace, calibration=calibration
        )
    data = draft.data()
    target = out or Path(f"{data['name']}.yaml")
    check_free(target, force)
    if nccl:
        machines = load_cluster(data["cluster"] if from_verl else cluster or CLUSTER)
        base, name_ = str(data["calibration"]), str(data["name"])
        fitted = calibration_from_nccl(nccl, gpu=machines.gpu.name, base=base, name=name_, folder=folder)
        draft.entries["calibration"] = Entry(fitted, f"collectives of {', '.join(map(str, nccl))}; the rest of {base}")
    refused = check(draft, folder)
    if refused:
        draft.notes.insert(0, f"DOES NOT RUN AS IT STANDS: {refused}")
    draft.write(target, force=force)
    _report(draft, target, refused)


def _report(draft: Draft, target: Path, refused: str) -> None:
    from rlsim.cli.terminal import Console

    console = Console(soft_wrap=True, highlight=False, markup=False)
    for note in draft.notes[bool(refused) :]:
        console.print(f"note: {note}", style="dim")
    for item in draft.missing:
        console.print(f"not represented: {item}", style="dim")
    console.print(f"wrote {target}")
    if refused:
        echo(f"rlsim: {target} does not run as it stands: {refused}", err=True)
        raise typer.Exit(1)
    console.print(f"run it: rlsim run {target}")
