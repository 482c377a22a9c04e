"""Job scripts for machines: the profile of a site, and the script of a job for its scheduler.

Only `hpctrain submit` and `hpctrain sites` call this package. Read `profile.py` first.
"""
