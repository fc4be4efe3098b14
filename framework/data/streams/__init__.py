"""Streams: datasets that are read from front to back. Import from the modules."""
