"""Attention core: governed by the query tile of the kernel, whatever the context length."""

import pytest

from pytest_nfp.cases import Case
from pytest_nfp.plugin import Nfp


@pytest.mark.nfp(module="attention", question="granularity")
def test_granularity(nfp: Nfp, case: Case) -> None:
    """The release still maps tokens to the same tiles, through the same kernel, as the baseline says."""
    nfp.check_granularity(case)


@pytest.mark.nfp(module="attention", question="prediction")
def test_prediction(nfp: Nfp, case: Case) -> None:
    """The principle and the tile roofline give the N_max that the baseline says."""
    nfp.check_prediction(case)


@pytest.mark.nfp(module="attention", question="boundary")
def test_boundary(nfp: Nfp, case: Case) -> None:
    """The measured or recorded N_max is what is predicted, and what the baseline says."""
    nfp.check_boundary(case)
