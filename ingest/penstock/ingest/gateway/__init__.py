"""The OpenAI-compatible gateway.

Stateless: what must outlive a request is in Redis, in the topics, or in the file store.
"""
