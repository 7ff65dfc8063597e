"""What rules of placement are compared on: `traces`, and the `rules`."""
