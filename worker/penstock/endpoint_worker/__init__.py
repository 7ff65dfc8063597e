"""Request → answer of a server with OpenAI's API → token stream, result."""
