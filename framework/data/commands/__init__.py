"""The commands of `python -m framework.data`, one file each."""
