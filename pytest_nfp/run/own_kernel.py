"""A forward that a user's test brings: measured, and held to the granularity that the test gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytest_nfp.cases import Backend, Case
from pytest_nfp.catalog import Model
from pytest_nfp.curves import Curve
from pytest_nfp.devices.lock import device_lock
from pytest_nfp.measure import PROTOCOLS, sweep
from pytest_nfp.measure.grid import GRID
from pytest_nfp.measure.sweep import Interrupted
from pytest_nfp.predict import Predicted
from pytest_nfp.principle import ClosedForm
from pytest_nfp.run.questions import judge
from pytest_nfp.run.results import Results
from pytest_nfp.verdict import NOTHING_KNOWN, Basis, Verdict

OWN_GRID = (*GRID, 33, 65, 96, 128)
"""The positions measured by default: 1 to 128 with both sides of the usual tiles' edges."""


def own_case(gpu: str, name: str) -> Case:
    """The case of a forward that a user's test brings, by the test's name."""
    return Case(gpu, Backend("own", ""), "own", Model(name=name, hidden=1, source="own kernel"), "any")


def sweep_own(
    results: Results,
    case: Case,
    make_forward: Callable[[int], Callable[[], object]],
    positions: Sequence[int] | None,
    baseline_positions: int,
) -> Curve:
    """Measure a user's own forward. Raises LookupError where the device is not here, Interrupted."""
    inputs, name = results.inputs, case.subject.name
    device, absent = inputs.device(case.gpu)
    if device is None:
        raise LookupError(absent)
    with device_lock(device):
        try:
            return sweep(
                make_forward,
                positions or list(OWN_GRID),
                device,
                PROTOCOLS[inputs.settings.protocol],
                inputs.settings.tolerance,
                baseline_positions,
                inputs.settings.seed,
                name,
                lambda text: inputs.say(f"{name}: {text}"),
            )
        except Interrupted as interrupted:
            results.note_interrupted(case, NOTHING_KNOWN, interrupted.curve)
            raise


def check_own(results: Results, case: Case, curve: Curve, granularity: int | None) -> Verdict:
    """Hold a user's curve to its granularity (N_max = rows of a tile) and to its stored baseline."""
    if granularity is None:
        return judge(results, case, curve, NOTHING_KNOWN)
    rows = ClosedForm(None, None, None, None, granularity, "granularity")
    return judge(results, case, curve, Basis(Predicted(None, rows, None, "the granularity that the test gives")))
