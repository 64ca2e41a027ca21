"""What tests and doubts look with: events, delays, what a step left behind, float64."""
