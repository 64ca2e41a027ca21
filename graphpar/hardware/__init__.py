"""What programs are planned for: devices, links, clusters."""
