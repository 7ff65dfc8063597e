"""The bus on Redis Streams."""
