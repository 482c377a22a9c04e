"""Runs: how they are built, trained, resumed, evaluated, and used to predict.

`training` has the sequence of a training, `build` makes its objects from the configuration, and `resume` finds the checkpoint
that it resumes from. Packages from `doctor` and `report` upwards may import this package. Read `training` first.
"""
