"""A step of a job on all ranks as data, and the prediction of its time, memory and bytes. Read `step_program.py` first."""
