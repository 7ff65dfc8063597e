"""The clients: send requests and read their streams."""
