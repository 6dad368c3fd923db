"""`regard align`."""
