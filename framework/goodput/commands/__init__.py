"""The verbs of `python -m framework.goodput`."""
