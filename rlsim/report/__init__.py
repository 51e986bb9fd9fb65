"""Results as a page for people: one HTML file that needs nothing else, and the same charts as pictures."""
