"""The second home of checkpoints: a volume that other hosts see."""
