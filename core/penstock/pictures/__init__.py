"""Pictures in prompts: where they lie, how their files are read, and how many tokens they become."""
