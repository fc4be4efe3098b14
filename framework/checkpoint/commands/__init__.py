"""The commands of `python -m framework.checkpoint`, one file each."""
