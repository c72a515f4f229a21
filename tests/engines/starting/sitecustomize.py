"""On the path of engines that tests start: a third of what imports take is Python's collector, which comes seldom."""

import gc

gc.set_threshold(100_000, 20, 100)
