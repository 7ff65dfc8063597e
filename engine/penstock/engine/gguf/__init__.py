"""The GGUF file format."""
