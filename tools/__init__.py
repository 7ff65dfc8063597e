"""Programs that write the documents and the model that ship; the package does not import them."""
