"""The configuration of a run: its keys, values and defaults, and the checks that need no ranks.

`load` reads YAML and overrides, `schema` defines the keys, `options` the names and options of the registries, `checks` the rules
between values, `grid` the model and its plan on a grid, and `resume_rules` the changes that are allowed when a run resumes.
Packages above this one may import it; it does not communicate. Read `schema` first.
"""
