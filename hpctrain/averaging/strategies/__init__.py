"""Averaging strategies, one a file: each module defines one strategy, which has its name."""
