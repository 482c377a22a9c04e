"""Job scripts for machines: what is known of a site, and a job on it as a script that its scheduler takes.

`hpctrain submit` and `hpctrain sites` are the only callers. Read `profile.py` first.
"""
