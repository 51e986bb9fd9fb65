"""What results look like: charts, reports, timelines."""
