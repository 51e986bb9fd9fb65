"""What the charts show, as plain tables: pandas in, pandas out."""
