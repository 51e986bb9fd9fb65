"""Every calibration by name, made on demand: what it needs of others is made first, and nothing twice."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from calibration.a40 import fit_a40, under_engine
from calibration.derived import derive
from calibration.gpus import DERIVED, GPUS
from calibration.host import Serving, fit_serving
from calibration.measured import against_hot_rows, fit_measured, with_hot_rows
from rlsim.cost.calibration import Calibration, Engine, Residual
from rlsim.validate.serving import SERVED

ENGINES: tuple[Engine, ...] = ("sglang", "vllm", "trtllm")
SERVED_ON = "h100-sxm"  # the GPU of the serving runs


class Catalogue:
    """The calibrations that the tables in `data` give."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self._kernels = cache(self._fit_kernels)
        self.serving = cache(self._serving)
        self.calibration = cache(self._calibration)

    @staticmethod
    def names() -> list[str]:
        """Every calibration."""
        gpus = (*GPUS, *DERIVED)
        return sorted(["a40-sglang", "a40-vllm", *(f"{gpu}-{engine}" for gpu in gpus for engine in ENGINES)])

    def all(self) -> dict[str, Calibration]:
        """Every calibration by name."""
        return {name: self.calibration(name) for name in self.names()}

    def hot(self) -> dict[str, dict[str, Residual]]:
        """How the kernels of the measured GPUs compare with L2-hot rows, by calibration and operator."""
        return {
            f"{name}-{engine}": against_hot_rows(self.data, gpu, self._kernels(name, engine))
            for name, gpu in sorted(GPUS.items())
            for engine in sorted(ENGINES)
        }

    def servings(self) -> dict[Engine, Serving]:
        """The serving runs by engine."""
        return {engine: self.serving(engine) for engine in SERVED}

    def servings_hot(self) -> dict[Engine, Serving]:
        """The serving runs predicted with kernels that are fitted to L2-hot rows too."""
        cold = {engine: self._kernels(SERVED_ON, engine) for engine in SERVED}
        return {
            engine: fit_serving(self.data, with_hot_rows(self.data, GPUS[SERVED_ON], kernels))
            for engine, kernels in cold.items()
        }

    def _fit_kernels(self, gpu: str, engine: Engine) -> Calibration:
        return fit_measured(self.data, GPUS[gpu], engine)

    def _serving(self, engine: Engine) -> Serving:
        return fit_serving(self.data, self._kernels(SERVED_ON, engine))

    def _calibration(self, name: str) -> Calibration:
        gpu, _, suffix = name.rpartition("-")
        engine = next(engine for engine in ENGINES if engine == suffix)
        if gpu == "a40":
            donor = self.calibration(f"l40s-{engine}")
            return (
                fit_a40(self.data, donor) if engine == "sglang" else under_engine(self.calibration("a40-sglang"), donor)
            )
        if gpu in DERIVED:
            return derive(self.calibration(f"{DERIVED[gpu].source}-{engine}"), gpu)
        host = self.serving(engine).host
        reused = "" if gpu == SERVED_ON else "; reused from H100, host CPUs may differ"
        host = host.model_copy(update={"source": host.source + reused})
        return self._kernels(gpu, engine).model_copy(update={"host": host})
