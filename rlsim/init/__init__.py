"""First experiments: a commented starter, or one made from a veRL configuration."""
