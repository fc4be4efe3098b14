"""The copy of a run on a tracking server, made by a process of its own."""
