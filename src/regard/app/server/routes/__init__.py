"""What the endpoints answer, one module per page."""
