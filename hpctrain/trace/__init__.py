"""Traces: a recorder of events, the table of step times, and trace files.

All packages may import this one; it imports none of them. Read `tracer.py` first; `time_table.py` derives the table, `chrome.py`
writes and reads files.
"""
