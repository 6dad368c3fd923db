"""Looking at attention: pictures."""
