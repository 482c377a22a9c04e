"""Time lines: a recorder of events, the table of where a step's time goes, and trace files.

Any room may import it, as it imports nothing of them. Read `tracer.py` first; `time_table.py` derives the table, `chrome.py`
writes and reads files.
"""
