"""The parts of a report: headings, charts with captions, tables."""
