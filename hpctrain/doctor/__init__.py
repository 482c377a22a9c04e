"""`hpctrain doctor`: whether a training would run well here. Facts are gathered on every rank and judged on rank 0."""
