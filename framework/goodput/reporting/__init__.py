"""What the account of a run is shown as. Import from the modules."""
