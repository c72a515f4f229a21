"""The machine and its processes, for all parts of kcap; the standard library and torch alone at import."""
