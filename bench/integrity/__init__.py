"""What keeps a Solution from fooling, or harming, those who judge it: its confinement, and the driver that times it."""
