"""pytest-nfp: tests for how many decode positions one forward can process nearly for free.

The data flows one way, each step a package or module that imports only what stands to its left:
settings -> cases -> granularity -> principle -> measure -> verdict -> record -> report.
Nothing is imported here: pytest loads this package in every run, used or not.
"""

__version__ = "0.1.0"
