"""Systems as parts that a line of YAML names: one file per published system."""
