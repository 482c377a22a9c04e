"""The process of a rank: the order of its start, its session, and the text and exit code of its end. Read `start` first."""
