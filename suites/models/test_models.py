"""Full models on the engines that run them, dummy weights: T(N) of one forward, proven to be of N positions over L cached tokens.

On a CPU at tiny scale, which keeps the ratios that decide granularity (--nfp-scale). Held to their baseline, and to the sum of
their modules, measured one by one on the same device.
"""

import pytest

from pytest_nfp.cases import Case
from pytest_nfp.plugin import Nfp


@pytest.mark.nfp(module="model", question="boundary")
def test_boundary(nfp: Nfp, case: Case) -> None:
    """The measured N_max is what the baseline says, and what the model's modules add up to."""
    nfp.check_boundary(case)
