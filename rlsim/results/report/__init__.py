"""Results as people look at them: one HTML page that needs nothing else, its charts as pictures, a timeline."""
