"""Weight files, their formats, and the form that weights get."""
