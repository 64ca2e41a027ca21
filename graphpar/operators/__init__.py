"""What is known of operators: rules in factors, placements, proofs by execution, the batch."""
