"""`python -m kcap` is `kcap`."""

from kcap.cli import main

main()
