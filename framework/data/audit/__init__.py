"""Which samples were trained: written down by the run, and proved or refuted afterwards."""
