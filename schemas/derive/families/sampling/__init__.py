"""Scores of a vocabulary, or of experts: `sampling` draws from them, `scores` norms and ranks them."""
