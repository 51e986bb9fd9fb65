"""The calibration of a GPU without tables: another one's efficiencies on its own data-sheet figures."""

from __future__ import annotations

from calibration.gpus import DERIVED
from calibration.training import carried_over
from rlsim.calibrate.build import without_corrections
from rlsim.cost.calibration import Calibration, Reference
from rlsim.hardware import load_cluster


def derive(source: Calibration, gpu: str) -> Calibration:
    """`source`'s efficiencies on `gpu`; the link stays that of the measured node."""
    about = DERIVED[gpu]
    reference = Reference.of(load_cluster(about.cluster))
    notes = (f"derived: {about.note}", *source.provenance.notes)
    residuals = {
        key: value.model_copy(update={"note": f"of {source.gpu}; not measured on {gpu}. {value.note}".strip()})
        for key, value in source.residuals.items()
    }
    operators = source.operators
    if reference.sm_count != source.reference.sm_count:
        operators = without_corrections(operators)
    update = {
        "operators": operators,
        "name": f"{gpu}-{source.engine}",
        "gpu": gpu,
        "reference": reference.model_copy(update={"link_bytes_per_s": source.reference.link_bytes_per_s}),
        "provenance": source.provenance.model_copy(update={"notes": notes}),
        "residuals": residuals,
        "training": carried_over(source.training, source.reference, gpu, reference),
    }
    return source.model_copy(update=update)
