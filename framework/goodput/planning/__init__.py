"""How often to save, what failures cost, and what a run would be on another cluster."""
