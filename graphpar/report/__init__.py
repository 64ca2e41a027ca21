"""What the compiler decided and what it costs: plain data, text for a terminal, a page."""
