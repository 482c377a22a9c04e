"""Averaging strategies: each module defines one, under the module's name."""
