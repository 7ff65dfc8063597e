"""Pictures in prompts: their rows among the prompt's tokens, their pixels, and what the model sees in them."""
