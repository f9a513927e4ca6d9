"""The families whose layers are attention and a dense feed-forward network: which config.json means which spec."""
