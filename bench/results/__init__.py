"""What `kcap bench` writes: Outcomes as they come, what was judged, and both in the formats of others."""
