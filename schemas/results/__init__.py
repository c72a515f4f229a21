"""What kcap reports: measurements of replay, outcomes of the judge, coverage of a Recording, losses of an export."""
