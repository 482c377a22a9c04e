"""Measurements of a machine: links, rates of operators, and the operators of a program. Read `measurement.py` first."""
