"""From a graph to an execution plan, in seven passes, each a pure function of what the passes before it made.

`compiler.py` calls them in order; read it first. `steps.py` has the first three (steps, recomputation, order), `memory.py` the
other four (liveness, sharing, packing, binding), and `plan.py` the result. `validate.py` runs a finished plan symbolically and
uses nothing of the passes. No array is allocated here.
"""
