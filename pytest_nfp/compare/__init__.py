"""Comparisons: two releases, two records, a case with its earlier state. Also the judgement of one curve by itself."""
