"""Traces: a recorder of events, the table of step times, and trace files.

All packages except `launch`, `config` and `core` may import this one; it imports only `core`. Read `tracer.py` first.
`time_table.py` derives the table; `chrome.py` writes and reads files.
"""
