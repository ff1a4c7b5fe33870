"""Dense FFN: governed by idle compute, N_max near balance * s / (2b)."""

import pytest

from pytest_nfp.cases import Case
from pytest_nfp.plugin import Nfp


@pytest.mark.nfp(module="dense", question="prediction")
def test_prediction(nfp: Nfp, case: Case) -> None:
    """The principle and the tile roofline give the N_max that the baseline says."""
    nfp.check_prediction(case)


@pytest.mark.nfp(module="dense", question="boundary")
def test_boundary(nfp: Nfp, case: Case) -> None:
    """The measured or recorded N_max is what is predicted, and what the baseline says."""
    nfp.check_boundary(case)
