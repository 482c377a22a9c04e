"""A run as data: the keys of a configuration, their values and defaults, and what can be said of them before there are ranks.

`load` reads YAML and overrides, `schema` has the keys, `options` the names and options that registries know, `checks` the rules
between values, `grid` the model and its plan on a grid, `resume_rules` what may change when a run resumes. Modules above this
package may import it; it communicates nothing. Read `schema` first.
"""
