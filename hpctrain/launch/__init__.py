"""This process and its starter: signals, threads, and how its end is reported. Loads nothing heavy."""
