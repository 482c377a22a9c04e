"""Flight records: each rank's last operations, kept outside of its process and read when a job has died.

`ring.py` is the file, `recorder.py` writes it, `autopsy.py` reads those of all ranks. Imports `core` and `launch` only. Read
`recorder.py` first.
"""
