"""The configuration of a run: its keys, values and defaults.

`load` reads YAML and overrides, `schema` defines the keys, and `resume_rules` the changes that are allowed when a run resumes.
Almost every package may import this one. Read `schema` first.
"""
