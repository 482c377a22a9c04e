"""Runs, from a session to results: they are built, trained, resumed, evaluated, and used to predict.

`training` has the sequence of a training, `build` makes its objects from the configuration, `resume` finds where it starts.
Packages from `doctor` and `report` upwards may import this package. Read `training` first.
"""
