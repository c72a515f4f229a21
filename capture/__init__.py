"""Recording: start an engine with taps on, follow it, and fold what its processes left into a Recording."""
