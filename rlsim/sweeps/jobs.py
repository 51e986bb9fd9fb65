"""The runs of an experiment on the cores of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from rlsim.errors import RlsimError
from rlsim.experiment.case import Execute, Job, Ran, in_turn
from rlsim.sweeps.local import cores, run_locally
from rlsim.sweeps.task import Failed


def in_processes(workers: int | None = None) -> Execute:
    """Does the jobs of `rlsim.experiment.run.run_loaded` in so many processes (default: one a core); one is this one.

    The processes end with the last answer, or as soon as answers are not wanted any more.
    """
    workers = workers or cores()

    def execute(jobs: Sequence[Job], begun: Callable[[Job], None]) -> Iterator[tuple[Job, Ran | RlsimError]]:
        with closing(run_locally(jobs, workers, begun)) as answers:
            for job, result, _ in answers:
                failed = isinstance(result, Failed)
                yield job, RlsimError(f"{job.name}: {result.error}") if failed else result

    return in_turn if workers == 1 else execute
