"""Side-by-side measurement: methods, machines, networks."""
