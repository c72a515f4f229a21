"""`kcap report`: what a Recording holds, as one HTML file. Read document.py, calls.py, steps.py, then page.py."""
