"""Anthropic's endpoint for messages as data: a translation to and from chats. No I/O."""
