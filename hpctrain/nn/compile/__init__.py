"""Compiler from a graph to an execution plan, in seven passes. Each pass is a pure function of the results of earlier passes.

`compiler.py` calls them in order; read it first. `steps.py` has the first three (steps, recomputation, order), `memory.py` the
other four (liveness, sharing, packing, binding), and `plan.py` the result. `validate.py` runs a finished plan symbolically and
uses no code of the passes. No array is allocated here. `nn` imports this package, and the planner builds plans with it.
"""
