"""The books of a run: its journal turned into one timeline and its figures."""
