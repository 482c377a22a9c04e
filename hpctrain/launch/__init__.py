"""How this process stands to whoever started it: signals, and how its end is reported. Loads nothing heavy."""
