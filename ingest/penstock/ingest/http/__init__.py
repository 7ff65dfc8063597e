"""What HTTP is: connections, limits, the form of errors, uploads, figures, and the page. It knows no gateway."""
