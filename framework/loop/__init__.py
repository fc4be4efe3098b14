"""The parts of the step loop: what the trainer drives."""
