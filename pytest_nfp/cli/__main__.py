"""python -m pytest_nfp.cli."""

import sys

from pytest_nfp.cli import main

sys.exit(main())
