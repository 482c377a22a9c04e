"""Flight records: the last operations of each rank, stored outside its process and read after a job has died.

`ring.py` is the file format, `recorder.py` writes a record, and `autopsy.py` analyses the records of all ranks. Read
`recorder.py` first. This package imports `core` and `launch` only; `comm` and the packages that run or inspect jobs import it.
"""
