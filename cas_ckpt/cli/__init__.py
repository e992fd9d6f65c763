"""The command line: parse, call one verb of the face, print.

Invariant: nothing is decided here about repositories; this room alone reads the environment.
"""
