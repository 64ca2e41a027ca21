"""The hardware that programs are planned for: devices, links, clusters."""
