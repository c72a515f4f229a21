"""What the Outcomes of a run come to: a Score for each Solution, and the time that it saves, by the recorded counts."""
