"""Averaging strategies, one a file."""
