"""The taps of libraries whose functions are called from Python and never reach the dispatcher: one file each.

`library` is what they share: a call that is reported, and a package whose functions are replaced everywhere.
"""
