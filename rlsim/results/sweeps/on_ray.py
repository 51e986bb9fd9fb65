"""Points on a Ray cluster. Every node needs the same rlsim; the files that the experiments name are sent along."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlsim.errors import ConfigError, RlsimError
from rlsim.results.sweeps.points import files_of
from rlsim.results.sweeps.task import POINTS_OF_A_WORKER, Answers, Failed, Task, carried_out

#: How long a cluster's address may take to answer (s).
CONNECT_S = 10.0


def run_on_ray(tasks: Sequence[Task], workers: int | None, address: str | None) -> Answers:
    """Run tasks in a Ray cluster, `workers` at a time (default: its CPUs); answers come as they are ready.

    `address` is the cluster's (default: `RAY_ADDRESS`, else a Ray is started here and stopped at the end). Raises
    `RlsimError` if Ray cannot be reached; see also `check_ray`.
    """
    if not tasks:
        return
    ray = _ray()
    with tempfile.TemporaryDirectory(prefix="rlsim-sweep-") as staging, _connected(ray, address, Path(staging), tasks):
        run_task = ray.remote(max_retries=0, max_calls=POINTS_OF_A_WORKER)(_run_there)
        most = workers or max(int(ray.cluster_resources().get("CPU", 1)), 1)
        yield from carried_out(
            tasks,
            most,
            lambda task: run_task.remote(replace(task, folder=Path())),
            lambda these: [(one, _result(ray, one)) for one in ray.wait(these, num_returns=1)[0]],
        )


def _run_there(task: Task) -> Mapping[str, bytes] | Failed:
    """In a worker: the working directory holds the files that the experiment names."""
    return replace(task, folder=Path.cwd()).run()


def _result(ray: Any, reference: Any) -> Mapping[str, bytes] | Failed | str:
    """What a task came to; text says how its worker or node died."""
    errors = ray.exceptions
    try:
        return ray.get(reference)  # type: ignore[no-any-return]
    except errors.OutOfMemoryError:
        return "Ray ended its worker for want of memory"
    except (errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError):
        return "its Ray worker died"
    except errors.RuntimeEnvSetupError as error:
        raise RlsimError(f"Ray cannot prepare its workers: {error}") from None
    except errors.RayTaskError as error:  # rlsim is missing there, or another one
        return Failed(f"cannot run on a Ray worker: {str(error).strip().splitlines()[-1]}")


def check_ray(address: str | None) -> None:
    """Raises `RlsimError` if Ray is missing, in use by this process, or nothing listens at its address."""
    if _ray().is_initialized():
        raise ConfigError("this process is connected to a Ray cluster already; call ray.shutdown() first")
    _check_reachable(address or os.environ.get("RAY_ADDRESS"))


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("the executor ray needs Ray: pip install 'rlsim[ray]'") from None
    return ray


@contextmanager
def _connected(ray: Any, address: str | None, staging: Path, tasks: Sequence[Task]) -> Iterator[None]:
    """A connection to the cluster, whose workers start in a copy of the files that the tasks read."""
    for task in tasks:
        for name, path in files_of(task.point.experiment(task.shown), task.shown, task.folder).items():
            target = staging / name
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    # The search path of this process, for nodes where the same rlsim lies at the same place.
    environment = {"working_dir": str(staging), "env_vars": {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}}
    try:
        ray.init(address=address, runtime_env=environment, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise RlsimError(f"cannot connect to Ray{f' at {address}' if address else ''}: {error}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str | None) -> None:
    """Raises `RlsimError` if nothing listens at `host:port`: Ray itself would go on trying for many minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # none, `auto` or `local`
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise RlsimError(f"cannot connect to Ray at {address}: {error.strerror or error}") from None
