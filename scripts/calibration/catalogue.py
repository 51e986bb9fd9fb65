"""Every calibration by name, made on demand: what it needs of others is made first, and nothing twice."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from calibration.gpus import ENGINES, GPUS, OLDER
from calibration.measured import HotRows, against_hot_rows, fit_measured
from evidence.validate.transfer import shipped_fits
from rlsim.cost.calibration import Calibration, Engine

#: Since this release vLLM schedules an iteration while the one before runs, unless it is told not to.
ASYNC_SCHEDULING = (0, 14)
SERVED_ON = "h100-sxm"  # the GPU of the serving runs


class Catalogue:
    """The calibrations that the tables in `data` give."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.kernels = cache(self._kernels)
        self.calibration = cache(self._calibration)

    @staticmethod
    def names() -> list[str]:
        """Every calibration that is fitted."""
        return sorted([f"{name}-{engine}" for name, gpu in GPUS.items() for engine in gpu.versions] + [*OLDER])

    def hot(self) -> dict[str, dict[str, HotRows]]:
        """How the kernels of the measured GPUs compare with L2-hot rows, by calibration and operator."""
        return {
            f"{name}-{engine}": against_hot_rows(self.data, gpu, self.kernels(name, engine))
            for name, gpu in sorted(GPUS.items())
            for engine in sorted(gpu.versions)
        }

    def _kernels(self, gpu: str, engine: Engine, release: str = "") -> Calibration:
        about = GPUS[gpu]
        about = replace(about, versions={**about.versions, engine: release}) if release else about
        return fit_measured(self.data, about, engine)

    def _calibration(self, name: str) -> Calibration:
        """With the host time and front end that the serving runs of its engine give."""
        gpu, _, suffix = name.rpartition("-")
        own = OLDER.get(name) or (gpu, next(engine for engine in ENGINES if engine == suffix))
        kernels = self.kernels(*own)
        fit = shipped_fits().of(kernels.engine)
        reused = "" if kernels.gpu == SERVED_ON else "; reused from H100, host CPUs may differ"
        ahead = kernels.engine == "vllm" and tuple(map(int, kernels.release.split(".")[:2])) >= ASYNC_SCHEDULING
        update = {
            part: record.model_copy(update={"source": record.source + reused})
            for part, record in (("host", fit.host), ("front_end", fit.front_end))
        }
        return kernels.model_copy(update={**update, "name": name}).scheduled(True if ahead else None)
