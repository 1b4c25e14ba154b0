"""The half that decides: which sequence computes which tokens in which blocks. Pure Python, no torch."""
