"""What executors share: slots, the units that slots take in turn, and the threads that feed them."""
