"""What several forms of an agent trace share: `own` for what only a Turn tells, `spans` for OpenTelemetry's spans."""
