"""State-space layers (Mamba-2), and the families that have them."""
