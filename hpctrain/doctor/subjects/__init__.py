"""The subjects that the doctor looks at, one a module: what is gathered on each rank, and a pure function that judges it."""
