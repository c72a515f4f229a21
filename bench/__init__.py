"""Runs what was recorded as benchmarks, here and elsewhere: exports to other benchmarks' formats."""
