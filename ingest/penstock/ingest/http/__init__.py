"""The HTTP server: connections, limits, the form of errors, uploads, figures, the page. It knows no gateway."""
