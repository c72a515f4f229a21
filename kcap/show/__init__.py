"""What people see: tables of Recordings and datasets, summaries, progress."""
