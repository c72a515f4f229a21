"""Sources of calls inside an engine's process: one file each. The dispatcher's are the recorders themselves."""
