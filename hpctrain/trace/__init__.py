"""Traces: a recorder of events, the table of step times, and trace files.

All packages but `launch` and `core` may import this one; it imports `core` at most. Read `tracer.py` first; `time_table.py`
derives the table, `chrome.py` writes and reads files.
"""
