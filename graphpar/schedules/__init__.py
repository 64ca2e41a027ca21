"""Pipeline schedules: the registry, tables, their order, and a simulator."""
